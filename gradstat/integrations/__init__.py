"""Adapters for training frameworks and loggers; each module imports its framework, and nothing in gradstat imports it.

`gradstat.integrations.lightning` has the callback for Lightning; `gradstat.integrations.transformers` and
`gradstat.integrations.accelerate` have an ``install`` each; `gradstat.integrations.loggers` writes statistics to
TensorBoard, Weights & Biases, MLflow, CSV and JSON lines.
"""
