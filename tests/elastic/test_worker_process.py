from oobleck_jax.elastic.worker_process import worker_environment


LIMIT = "--xla_cpu_collective_timeout_seconds=600"


def test_one_thread_and_several_devices_are_appended_to_the_users_flags() -> None:
    environment = worker_environment(
        {"XLA_FLAGS": "--xla_dump_to=/x", "HOME": "/home/me"}, num_threads=1, num_devices=2
    )
    assert environment["XLA_FLAGS"] == (
        f"{LIMIT} --xla_dump_to=/x --xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=2"
    )
    assert environment["HOME"] == "/home/me"


def test_abandoned_sums_end_after_some_time_which_the_user_may_choose() -> None:
    assert worker_environment({}, num_threads=0, num_devices=1)["XLA_FLAGS"] == LIMIT
    given = {"XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=60"}
    assert worker_environment(given, num_threads=0, num_devices=1)["XLA_FLAGS"].endswith("_seconds=60")  # the last wins


def test_the_user_decides_how_much_xla_logs() -> None:
    assert worker_environment({}, num_threads=0, num_devices=1)["TF_CPP_MIN_LOG_LEVEL"] == "3"
    given = {"TF_CPP_MIN_LOG_LEVEL": "0"}
    assert worker_environment(given, num_threads=0, num_devices=1)["TF_CPP_MIN_LOG_LEVEL"] == "0"
