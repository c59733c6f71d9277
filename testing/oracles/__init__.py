"""Correct answers: ties between logits, the recall task."""
