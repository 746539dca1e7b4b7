"""The computation: workflows, nodes, and the contract between stages. Pure Python."""

from leaderless.workflow.columns import COLUMNS as COLUMNS
from leaderless.workflow.columns import DATA_COLUMNS as DATA_COLUMNS
from leaderless.workflow.columns import DATA_PREFERENCE_COLUMNS as DATA_PREFERENCE_COLUMNS
from leaderless.workflow.columns import DATA_RESPONSE_COLUMNS as DATA_RESPONSE_COLUMNS
from leaderless.workflow.columns import EPISODE_IDS as EPISODE_IDS
from leaderless.workflow.columns import IMAGES as IMAGES
from leaderless.workflow.columns import IS_GREEDY as IS_GREEDY
from leaderless.workflow.columns import Column as Column
from leaderless.workflow.read import builtin_workflows as builtin_workflows
from leaderless.workflow.read import load_recipe as load_recipe
from leaderless.workflow.read import read_workflow as read_workflow
from leaderless.workflow.read import resolve_workflow as resolve_workflow
from leaderless.workflow.read import write_workflow as write_workflow
from leaderless.workflow.stage import StageSpec as StageSpec
from leaderless.workflow.stage import stage as stage
from leaderless.workflow.stages import BUILTIN_STAGES as BUILTIN_STAGES
from leaderless.workflow.stages import log_probs_column as log_probs_column
from leaderless.workflow.stages import scored_agent as scored_agent
from leaderless.workflow.stages import spec_of as spec_of
from leaderless.workflow.workflow import Node as Node
from leaderless.workflow.workflow import Workflow as Workflow
