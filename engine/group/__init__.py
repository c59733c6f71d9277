"""How processes that compute together meet, keep in step and notice that one of them is gone."""
