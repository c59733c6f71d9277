"""The same tokens as transformers, whatever the family, ranks, drafts and number formats."""
