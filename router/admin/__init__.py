"""The admin API, `/admin/v1`: for operators of a router, who need a separate token."""
