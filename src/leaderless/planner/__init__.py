"""Where a workflow runs: layouts, columns, chains, bytes and memory. Pure Python, no torch."""

from leaderless.planner.engines import rollout_engine as rollout_engine
from leaderless.planner.engines import train_backend as train_backend
from leaderless.planner.entries import Action as Action
from leaderless.planner.entries import Load as Load
from leaderless.planner.entries import Pull as Pull
from leaderless.planner.entries import Push as Push
from leaderless.planner.entries import Repeat as Repeat
from leaderless.planner.entries import Reshard as Reshard
from leaderless.planner.entries import RunNode as RunNode
from leaderless.planner.entries import SyncWeights as SyncWeights
from leaderless.planner.entries import Windowed as Windowed
from leaderless.planner.entries import flat as flat
from leaderless.planner.layout import Cluster as Cluster
from leaderless.planner.layout import Layout as Layout
from leaderless.planner.layout import format_ranks as format_ranks
from leaderless.planner.make_plan import make_plan as make_plan
from leaderless.planner.memory.rank import format_bytes as format_bytes
from leaderless.planner.plan import Plan as Plan
from leaderless.planner.plan import trained_instance as trained_instance
from leaderless.planner.plan import trains_reward_model as trains_reward_model
from leaderless.planner.plan_parts import Channel as Channel
from leaderless.planner.plan_parts import Edge as Edge
from leaderless.planner.plan_parts import Loop as Loop
from leaderless.planner.plan_parts import PlannedNode as PlannedNode
from leaderless.planner.plan_parts import RoleInstance as RoleInstance
from leaderless.planner.plan_parts import answering as answering
