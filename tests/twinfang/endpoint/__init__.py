"""Tests of what clients of an OpenAI endpoint share."""
