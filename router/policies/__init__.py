"""Which of several servers takes a request: one small pure class a policy."""
