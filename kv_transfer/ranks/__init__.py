"""The handoff of servers whose ranks are separate processes."""
