"""What is right: ties between logits, the recall task."""
