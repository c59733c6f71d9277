"""Tests of what documents say: links, paths, commands, versions."""
