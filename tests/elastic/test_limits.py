from dataclasses import fields

from oobleck_jax.elastic.limits import Limits


def test_patience_scales_every_time_and_no_count() -> None:
    limits, patient = Limits(), Limits().scaled(3.0)
    for field in fields(Limits):
        factor = 1 if field.name.startswith("max_") else 3.0
        assert getattr(patient, field.name) == factor * getattr(limits, field.name)


def test_each_failure_doubles_the_wait_but_the_first_costs_none() -> None:
    assert [Limits(backoff_s=2.0).backoff_after_s(num) for num in (1, 2, 3, 4)] == [0.0, 2.0, 4.0, 8.0]


def test_a_step_may_take_a_multiple_of_the_usual_time_but_never_less_than_the_least() -> None:
    limits = Limits(first_step_s=60.0, step_s=6.0, step_multiple=4.0)
    assert limits.step_limit_s([]) == 60.0
    assert limits.step_limit_s([0.1, 0.1, 9.0]) == 6.0
    assert limits.step_limit_s([2.0, 2.0, 2.0, 50.0]) == 8.0
    assert limits.scaled(2.0).step_limit_s([2.0]) == 16.0
