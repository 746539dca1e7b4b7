"""A stand-in for NIXL 1.5.1: the methods that are used, with its signatures, states, errors and order of events.

Agents of different processes on one machine talk over sockets of the system. It moves the host's memory only.
"""
