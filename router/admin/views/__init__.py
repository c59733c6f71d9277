"""What the admin API shows: one process's view of each thing, and how the views of several processes become
one."""
