"""A stack whose model takes tools and thinks on request."""

import pytest

from testing.checkpoints.agent_model import write_agent_model


@pytest.fixture(scope="session")
def agent_model(tmp_path_factory):
    return write_agent_model(tmp_path_factory.mktemp("agent") / "bundled_model")


@pytest.fixture
def agent_stack(stacks, agent_model):
    return stacks("up", "--model", str(agent_model), "--max-num-seqs", "16")
