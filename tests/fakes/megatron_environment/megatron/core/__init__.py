"""Stand-in for megatron-core 0.18.0 on the CPU: what the back end uses, with the real signatures.

Each process has the whole model; what Megatron divides is divided in what it returns: only the last stage of a pipeline
has logits, and ranks along `tp` have those of some words each. Gradients add up over all processes.
"""
