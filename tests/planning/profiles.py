"""Profiles to plan with: uniform ones, and strategies for random ones with small whole numbers."""

from hypothesis import strategies as st

from oobleck_jax.config import Precision, Remat
from oobleck_jax.planning.profile import LayerCost, LayerProfile, Profile, Rate, StateBytes, TiedGroup


UNIT_S = 1e-6  # of the times below
FAST = Rate(bytes_per_s=1e30, latency_s=0.0)


def make_profile(
    layers: list[LayerProfile], *, tied_groups: tuple[TiedGroup, ...] = (), link: Rate = FAST, sum: Rate = FAST
) -> Profile:
    return Profile(
        device="none",
        source="invented",
        microbatch_size=8,  # every number of devices can share it
        precision=Precision.FLOAT32,
        remat=Remat.NONE,
        layers=tuple(layers),
        tied_groups=tied_groups,
        link=link,
        sum=sum,
    )


def make_layer(
    times: list[tuple[float, float]],
    *,
    kind: str = "block",
    state_bytes: int = 0,
    residual_bytes: int = 0,
    temporary_bytes: int = 0,
    output_bytes: int = 0,
) -> LayerProfile:
    """Return a layer with (forward, backward) times in units for 1, 2, 4, ... devices."""
    costs = tuple(
        LayerCost(
            num_devices=1 << power,
            forward_s=forward * UNIT_S,
            backward_s=backward * UNIT_S,
            residual_bytes=-(-residual_bytes >> power),
            temporary_bytes=-(-temporary_bytes >> power),
        )
        for power, (forward, backward) in enumerate(times)
    )
    state = StateBytes(parameter_bytes=state_bytes, gradient_bytes=state_bytes, optimizer_bytes=2 * state_bytes)
    return LayerProfile(kind=kind, costs=costs, state=state, output_bytes=output_bytes)


def uniform_profile(
    num_layers: int, *, state_bytes: int = 0, residual_bytes: int = 0, link: Rate = FAST, sum: Rate = FAST
) -> Profile:
    """Return a profile of equal layers: forward 1 unit, backward 2."""
    layer = make_layer([(1, 2)], state_bytes=state_bytes, residual_bytes=residual_bytes)
    return make_profile([layer] * num_layers, link=link, sum=sum)


@st.composite
def profiles(
    draw: st.DrawFn, *, min_layers: int = 1, max_layers: int = 12, num_counts: int = 1, with_memory: bool = True
) -> Profile:
    """Draw a profile of a few kinds of layers, with costs for 1, 2, 4, ... devices."""
    number = st.integers(0, 9)
    kinds: list[LayerProfile] = []
    for index in range(draw(st.integers(1, 4))):
        times = [(draw(st.integers(1, 9)), draw(st.integers(1, 9))) for _ in range(num_counts)]
        kinds.append(
            make_layer(
                times,
                kind=f"kind{index}",
                state_bytes=draw(number) if with_memory else 0,
                residual_bytes=draw(number) if with_memory else 0,
                temporary_bytes=draw(number) if with_memory else 0,
                output_bytes=draw(number),
            )
        )
    layers = draw(st.lists(st.sampled_from(kinds), min_size=min_layers, max_size=max_layers))
    tied: tuple[TiedGroup, ...] = ()
    if len(layers) > 1 and draw(st.booleans()):
        state = StateBytes(parameter_bytes=3, gradient_bytes=3, optimizer_bytes=6)
        tied = (TiedGroup(name="wte", layers=(0, len(layers) - 1), state=state),)
    rate = st.sampled_from(
        [FAST, Rate(bytes_per_s=1 / UNIT_S, latency_s=0.0), Rate(bytes_per_s=3 / UNIT_S, latency_s=UNIT_S)]
    )
    return make_profile(layers, tied_groups=tied, link=draw(rate), sum=draw(rate))
