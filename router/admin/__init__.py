"""The admin API, `/admin/v1`: for operators of a router, with a token of its own."""
