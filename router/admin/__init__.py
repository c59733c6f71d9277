"""The admin API, `/admin/v1`: for those who operate a router, with a token of its own."""
