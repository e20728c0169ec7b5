from oobleck_jax.elastic.worker_process import worker_environment


def test_one_thread_and_several_devices_are_appended_to_the_users_flags() -> None:
    environment = worker_environment(
        {"XLA_FLAGS": "--xla_dump_to=/x", "HOME": "/home/me"}, num_threads=1, num_devices=2
    )
    assert environment["XLA_FLAGS"] == (
        "--xla_dump_to=/x --xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=2"
    )
    assert environment["HOME"] == "/home/me"


def test_a_worker_with_all_cores_and_one_device_gets_no_flags() -> None:
    assert "XLA_FLAGS" not in worker_environment({}, num_threads=0, num_devices=1)


def test_the_user_decides_how_much_xla_logs() -> None:
    assert worker_environment({}, num_threads=0, num_devices=1)["TF_CPP_MIN_LOG_LEVEL"] == "3"
    given = {"TF_CPP_MIN_LOG_LEVEL": "0"}
    assert worker_environment(given, num_threads=0, num_devices=1)["TF_CPP_MIN_LOG_LEVEL"] == "0"
