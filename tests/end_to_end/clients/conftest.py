"""A stack whose model takes tools and thinks on request."""

import pytest

from testing.checkpoints.agent_model import write_agent_model


@pytest.fixture(scope="session")
def agent_model(tmp_path_factory):
    return write_agent_model(tmp_path_factory.mktemp("agent") / "bundled_model")


@pytest.fixture(scope="package")
def running_agent(stacks, agent_model):
    """Starts the stack. Clients that are made later trust its authority, if it has one."""
    return lambda: stacks("up", "--model", str(agent_model), "--max-num-seqs", "16")


@pytest.fixture
def agent_stack(running_agent):
    return running_agent()
