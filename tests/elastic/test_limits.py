from dataclasses import fields

from oobleck_jax.elastic.limits import Limits


def test_patience_scales_every_limit() -> None:
    limits, patient = Limits(), Limits().scaled(3.0)
    for field in fields(Limits):
        assert getattr(patient, field.name) == 3.0 * getattr(limits, field.name)


def test_a_step_may_take_a_multiple_of_the_usual_time_but_never_less_than_the_least() -> None:
    limits = Limits(first_step_s=60.0, step_s=6.0, step_multiple=4.0)
    assert limits.step_limit_s([]) == 60.0
    assert limits.step_limit_s([0.1, 0.1, 9.0]) == 6.0
    assert limits.step_limit_s([2.0, 2.0, 2.0, 50.0]) == 8.0
    assert limits.scaled(2.0).step_limit_s([2.0]) == 16.0
