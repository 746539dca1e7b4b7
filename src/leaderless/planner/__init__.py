"""Where a workflow runs: layouts, columns, chains, bytes and memory. Pure Python, no torch."""

from leaderless.planner.layout import Cluster as Cluster
from leaderless.planner.layout import Layout as Layout
from leaderless.planner.layout import format_ranks as format_ranks
from leaderless.planner.make_plan import make_plan as make_plan
from leaderless.planner.memory import format_bytes as format_bytes
from leaderless.planner.plan import Action as Action
from leaderless.planner.plan import Edge as Edge
from leaderless.planner.plan import Load as Load
from leaderless.planner.plan import Plan as Plan
from leaderless.planner.plan import PlannedNode as PlannedNode
from leaderless.planner.plan import Repeat as Repeat
from leaderless.planner.plan import Reshard as Reshard
from leaderless.planner.plan import RoleInstance as RoleInstance
from leaderless.planner.plan import RunNode as RunNode
from leaderless.planner.plan import SyncWeights as SyncWeights
from leaderless.planner.plan import Windowed as Windowed
from leaderless.planner.plan import flat as flat
