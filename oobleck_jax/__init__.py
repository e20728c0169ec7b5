"""A pipeline trainer for JAX that keeps training when machines die (Oobleck, SOSP 2023)."""
