"""Where training frameworks and loggers meet gradstat; each module imports its framework, and nothing imports them.

`gradstat.integrations.lightning` has the callback for Lightning; `gradstat.integrations.transformers`,
`gradstat.integrations.accelerate` and `gradstat.integrations.fabric` have an ``install`` each;
`gradstat.integrations.loggers` writes statistics to TensorBoard, Weights & Biases, MLflow, CSV and JSON lines.
"""
