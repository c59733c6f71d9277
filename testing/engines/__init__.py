"""Engines of many configurations, and the requests and checks that tests use with them."""
