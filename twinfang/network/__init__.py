"""`twinfang check-network`: finds which transport UCX or NCCL would use between two hosts, and its speed."""
