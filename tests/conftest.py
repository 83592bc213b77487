import pytest

from .ranks import Pools
from .upstream_warnings import warnings_are_errors


@pytest.fixture(scope="session")
def ranks():
    """`ranks(size).run(function, *args)`: a pool of rank processes; `ranks(1)` is one plain process. See ranks.py."""
    pools = Pools()
    yield pools
    pools.stop()


@pytest.fixture(scope="session")
def single(ranks):
    """`single(function, *args)`: the function's result in one plain process, the reference."""
    return lambda function, *args, **kwargs: ranks(1).run(function, *args, **kwargs)[0]


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings_are_errors():
        yield
