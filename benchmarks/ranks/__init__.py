"""What several tensor-parallel ranks on one machine gain over one."""
