"""The computation: workflows, nodes, and the contract between stages. Pure Python."""

from leaderless.planner.workflow.builtin_stages import BUILTIN_STAGES as BUILTIN_STAGES
from leaderless.planner.workflow.builtin_stages import log_probs_column as log_probs_column
from leaderless.planner.workflow.builtin_stages import scored_agent as scored_agent
from leaderless.planner.workflow.builtin_stages import spec_of as spec_of
from leaderless.planner.workflow.columns import COLUMNS as COLUMNS
from leaderless.planner.workflow.columns import DATA_COLUMNS as DATA_COLUMNS
from leaderless.planner.workflow.columns import DATA_PREFERENCE_COLUMNS as DATA_PREFERENCE_COLUMNS
from leaderless.planner.workflow.columns import DATA_RESPONSE_COLUMNS as DATA_RESPONSE_COLUMNS
from leaderless.planner.workflow.columns import EPISODE_IDS as EPISODE_IDS
from leaderless.planner.workflow.columns import IMAGES as IMAGES
from leaderless.planner.workflow.columns import IS_GREEDY as IS_GREEDY
from leaderless.planner.workflow.columns import Column as Column
from leaderless.planner.workflow.read import WorkflowRecipe as WorkflowRecipe
from leaderless.planner.workflow.read import builtin_workflows as builtin_workflows
from leaderless.planner.workflow.read import load_recipe as load_recipe
from leaderless.planner.workflow.read import read_workflow as read_workflow
from leaderless.planner.workflow.read import resolve_workflow as resolve_workflow
from leaderless.planner.workflow.read import write_workflow as write_workflow
from leaderless.planner.workflow.stage_spec import StageSpec as StageSpec
from leaderless.planner.workflow.stage_spec import stage as stage
from leaderless.planner.workflow.workflow import Node as Node
from leaderless.planner.workflow.workflow import Workflow as Workflow
