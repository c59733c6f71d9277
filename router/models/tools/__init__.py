"""Tool calls in the text of chat answers: how they are written, found and enforced."""
