"""`dllm-jax check`: is it right and fast on this device?

One file per part of the report: `environment` (what is installed, and whether it goes together), `operations`
(every implementation compared with XLA's, right and fast), `tokens` (bundled models on the device and on the
CPU), `speed` (steps and generations of a shape over the roofline), `several` (meshes of all devices).
`command` runs them one after another, `report` collects what they find and comes to a verdict.
"""
