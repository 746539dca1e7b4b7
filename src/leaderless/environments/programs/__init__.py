"""Episodes that a program leads: it asks the policy whenever it likes, and says in the end what that was worth.

Imports no torch.
"""

from leaderless.environments.programs.chat import Chat as Chat
from leaderless.environments.programs.chat import ChatAnswer as ChatAnswer
from leaderless.environments.programs.conversations import AskRefusedError as AskRefusedError

__all__ = ["AskRefusedError", "Chat", "ChatAnswer"]
