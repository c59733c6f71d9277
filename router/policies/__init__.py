"""Policies decide which of several servers takes a request. Each policy is one small pure class."""
