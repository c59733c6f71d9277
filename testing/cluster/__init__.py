"""A real cluster on one machine: control plane, nodes with kubelets and containers, network."""
