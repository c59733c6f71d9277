"""Forked processes: those that tests start instead of importing everything anew, in
:mod:`testing.forking.start`, and a fork server and a child that say and do what tests of forking ask for."""
