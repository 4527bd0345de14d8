"""What torch's own tests hold of pipelines: test/distributed/pipelining."""

ROWS = """
test_schedule.py
  has     | every schedule is complete and in order, for any counts | pipelining/test_schedules.py::test_every_count_is_right
  has     | GPipe, 1F1B, interleaved, looped BFS as published | pipelining/test_schedules.py::test_equal_to_torch
  has     | zero-bubble schedules as torch's own | pipelining/test_schedules.py::test_equal_to_torch
  has     | a schedule by its name | examples/test_pipe.py::test_every_schedule_can_be_asked_for
  has     | stages that ranks do not divide are refused | pipelining/test_pipeline_bad_input.py::test_every_rank_says_what_is_wrong_and_sends_nothing
  has     | actions as text, and back | pipelining/test_schedules.py::test_text_comes_back
  differs | schedules as CSV | as rows of text | pipelining/test_schedules.py::test_text_comes_back
  has     | an action that is missing, twice, or too early is named | pipelining/test_refused.py::test_what_cannot_be_is_refused
  has     | sends and receives written into a schedule of computing | pipelining/test_schedules.py::test_named_schedules_run_with_edges_of_any_kind
  has     | a schedule that waits for itself is told | pipelining/test_verification.py::test_a_cycle_between_ranks_is_a_deadlock_with_a_table
  has     | I and W together are a whole backward | pipelining/test_stage_vjp.py::test_the_halves_are_the_whole
  has     | V placements: two stages of a rank are neighbours | pipelining/test_bubbles.py::test_stages_to_and_fro_save_transfers
  has     | stages to ranks, by loop and by V | pipelining/test_schedules.py::test_every_count_is_right
  differs | UNSHARD and RESHARD actions are written into schedules | shard gathers within a stage as it does without a pipeline | pipelining/test_pipeline_composition.py::test_gradients_are_reduced_when_the_order_says
  not     | DualPipeV | no action computes a forward and a backward at once; zb_v and searched schedules fill its place
  has     | evaluation: forwards alone | pipelining/test_pipeline_losses.py::test_a_schedule_of_forwards_evaluates
  differs | zero-bubble with a compiled stage is refused | compiled units run | core/test_compiled.py::test_what_is_compiled_between_units_runs_plainly_in_a_stage
  has     | one stage alone | pipelining/test_pipeline_ledger.py::test_a_chain_sends_each_activation_once_each_way
test_schedule_multiproc.py
  has     | outputs, losses and gradients of every schedule are those of one device | pipelining/test_pipeline_laws.py::test_a_pipelined_gradient_call_has_the_bits_of_one_device
  has     | over real processes | transforms/test_shard_processes.py::test_processes_equal_simulated_ranks
  has     | keyword arguments are cut too | pipelining/test_pipeline_losses.py::test_keywords_are_cut_too
  has     | several inputs and outputs between stages | pipelining/test_pipeline_ledger.py::test_of_a_tree_of_outputs_only_what_is_needed_travels
  differs | scale_grads divides by the microbatches | the loss is the mean of the batch, whatever the parts | pipelining/test_pipeline_laws.py::test_uneven_microbatches_make_the_mean_over_the_batch
  has     | a schedule of one's own from a list of actions | pipelining/test_pipeline_ledger.py::test_rows_of_text_are_verified_and_timed_as_they_are
  has     | step under no_grad returns outputs | pipelining/test_pipeline_losses.py::test_a_forward_pass_returns_rows_joined
  has     | what is held is freed after a step | transforms/test_growth.py::test_a_step_leaves_nothing
  not     | a forward hook, custom functions for an action | an action is what its name says: a schedule is data, proven before it runs
test_backward.py
  has     | gradients of inputs alone, of weights alone | pipelining/test_stage_vjp.py::test_products_of_weights_wait_where_they_can
  has     | several layers, and several microbatches | pipelining/test_pipeline_laws.py::test_a_pipelined_gradient_call_has_the_bits_of_one_device
  has     | weights that are frozen, or used in no output | pipelining/test_pipeline_losses.py::test_several_arguments_and_frozen_leaves
  has     | memory falls as the backward goes | pipelining/test_stage_vjp.py::test_a_whole_backward_frees_as_it_goes
test_stage.py
  has     | a shape or a dtype that is not the recorded one is told | pipelining/test_pipeline_changes.py::test_what_travels_has_the_recorded_shape
  differs | stages built by hand | stages= by counts or by names: one loss, cut | pipelining/test_stage_plans.py::test_stages_are_given_by_counts_or_by_names
  differs | a weight backward of one's own (dw_builder) | the tape is split by itself | pipelining/test_stage_vjp.py::test_products_of_weights_wait_where_they_can
  has     | stages that are not the last hold no outputs | pipelining/test_pipeline_memory.py::test_a_rank_holds_what_the_verifier_counts
test_microbatch.py
  has     | a batch cut and joined again | pipelining/test_pipeline_losses.py::test_a_forward_pass_returns_rows_joined
  has     | batches of any form | transforms/test_accumulate.py::test_batches_of_any_form
  differs | a chunk spec by argument | leaves with as many rows as the batch are cut, others not | pipelining/test_pipeline_argnums.py::test_parameters_as_long_as_the_batch_are_parameters
  not     | BlockMask is cut | attention masks are made within a unit, of its rows
test_pipe.py
  has     | a traced split computes what the model does | pipelining/test_pipeline_laws.py::test_a_stage_takes_and_sends_what_it_has_to_whatever_is_between_units
  has     | parameters have the names of the model | interop/test_modules.py::test_to_module_is_the_inverse
  has     | a weight that stages share | pipelining/test_pipeline_ledger.py::test_of_placed_leaves_only_those_that_stages_share_are_summed
  has     | skips across stages | pipelining/test_pipeline_ledger.py::test_a_skip_goes_straight_to_its_consumer
test_transformer.py
  has     | a transformer cut evenly by its layers | examples/test_pipe.py::test_pipelines_train_like_one_rank
test_unflatten.py
  differs | module structure is rebuilt from a graph | functions are cut, not graphs | tracing/test_program.py::test_a_program_reads_like_the_loss
test_composability.py
  has     | with FSDP inside | transforms/test_shard_laws.py::test_a_train_step_under_any_stack_has_the_bits_of_one_device
  has     | with replicas and tensor parallelism | pipelining/test_pipeline_composition.py::test_over_three_axes_with_replicas
test_dtensor_pp.py
  has     | layers that are split, in stages | transforms/test_split_leaves.py::test_training_is_that_of_one_device_as_planned
test_hf_transformers.py
  has     | a Hugging Face model in stages | interop/test_huggingface.py::test_a_model_trains_as_by_itself
"""  # noqa: E501
