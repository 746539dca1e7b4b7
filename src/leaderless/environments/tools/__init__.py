"""Tools that a policy may call: methods of environments, functions, and servers of the Model Context Protocol.

Imports no torch.
"""

from leaderless.environments.tools.calls import Call as Call
from leaderless.environments.tools.calls import CallResult as CallResult
from leaderless.environments.tools.calls import ToolCalls as ToolCalls
from leaderless.environments.tools.calls import result_messages as result_messages
from leaderless.environments.tools.function_tool import ToolError as ToolError
from leaderless.environments.tools.function_tool import tool as tool
from leaderless.environments.tools.toolbox import Toolbox as Toolbox

__all__ = ["Call", "CallResult", "ToolCalls", "ToolError", "Toolbox", "result_messages", "tool"]
