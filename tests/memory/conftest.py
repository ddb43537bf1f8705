from tests.model.conftest import _one_thread  # noqa: F401
