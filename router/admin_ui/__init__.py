"""The dashboard: one page of plain HTML, CSS and ES modules over the admin API."""
