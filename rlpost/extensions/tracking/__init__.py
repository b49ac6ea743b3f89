"""Mirrors of metrics: Weights & Biases, TensorBoard, Prometheus."""
