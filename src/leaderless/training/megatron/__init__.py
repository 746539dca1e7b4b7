"""The back end `megatron`: Megatron-Core in a process of its own next to each rank.

`engine` and `processes` run in the rank. The other modules run where Megatron is, in an environment that may
have none of this package's dependencies but torch, so they import nothing else.
"""
