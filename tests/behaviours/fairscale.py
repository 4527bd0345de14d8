"""What FairScale's own tests hold: tests/ of 0.4.13."""

ROWS = """
nn/data_parallel/test_fsdp.py
  has     | parity with one device, nested and not, clipped by p in {1, 2, inf} | fairscale/test_fairscale.py::test_a_sharded_step_is_fairscales
  has     | parameters on the host | fairscale/test_fairscale.py::test_a_sharded_step_is_fairscales
  has     | computing in float16, reduced in float32 | fairscale/test_fairscale.py::test_a_sharded_step_is_fairscales
  differs | move_grads_to_cpu=False with parameters there must raise | gradients follow their parameters; the trainer's knob works | examples/test_trainer.py::test_a_knob_gives_the_losses_of_one_device
  has     | experts that are not sharded over the data | transforms/test_split_leaves.py::test_training_is_that_of_one_device_as_planned
  not     | reset_parameters, deepcopy, pickles of a wrapper | no wrapper: parameters are trees, made by an init function
nn/data_parallel/test_fsdp_uneven.py
  has     | nine elements over two to eight ranks | sharded/test_layout.py::test_a_part_is_the_cut_by_definition_and_parts_make_the_whole
nn/data_parallel/test_fsdp_grad_acc.py
  has     | accumulated gradients are those of the whole batch | transforms/test_accumulate.py::test_it_equals_the_plain_loop_or_the_whole_batch_bit_by_bit
  has     | how often no_sync gathers and reduces | transforms/test_hybrid_reductions.py::test_bytes_over_data_are_of_each_and_over_replicas_of_one
nn/data_parallel/test_fsdp_state_dict.py
  has     | a full state dict, in float32 | fairscale/test_fairscale.py::test_a_sharded_step_is_fairscales
  has     | local state dicts are put together without ranks | checkpoint/test_other_readers.py::test_a_state_becomes_one_file_and_comes_back
nn/data_parallel/test_fsdp_optimizer_utils.py
  has     | the optimizer's state, gathered and cut again | state/test_train_state.py::test_unshard_undoes_place
  has     | on another number of ranks | checkpoint/test_resharding.py::test_any_layout_is_loaded_by_any_other
nn/data_parallel/test_fsdp_summon_full_params.py
  differs | whole parameters for a while, written back | ff.unshard gives values, init_state takes them | state/test_train_state.py::test_unshard_undoes_place
nn/data_parallel/test_fsdp_apply.py
  differs | a function over whole parameters | tree_map over parts; whole ones by unshard | sharded/test_sharded.py::test_maps_see_the_local_part_and_keep_the_layout
nn/data_parallel/test_fsdp_freezing_weights.py
  has     | frozen weights | interop/test_modules.py::test_frozen_parameters_have_no_gradient_no_moment_and_no_reduction
nn/data_parallel/test_fsdp_shared_weights.py
  has     | weights that layers share | transforms/test_shard_ledger.py::test_a_step_sends_what_the_closed_form_says
nn/data_parallel/test_fsdp_multiple_forward.py
  has     | several forwards before a backward, with checkpoints too | transforms/test_shard_ledger.py::test_a_step_sends_what_the_closed_form_says
nn/data_parallel/test_fsdp_fwd_fwd_bwd_bwd.py
  has     | two forwards, then two backwards | transforms/test_shard_laws.py::test_a_train_step_under_any_stack_has_the_bits_of_one_device
nn/data_parallel/test_fsdp_input.py
  has     | inputs as lists and dicts | core/test_units.py::test_any_pytree_in_and_out
nn/data_parallel/test_fsdp_grad_scaler.py
  has     | an overflow on one rank is one on all | optim/test_loss_scaling.py::test_an_overflow_on_one_rank_skips_the_step_on_all
nn/data_parallel/test_fsdp_hf_transformer_eval.py
  has     | a Hugging Face model, evaluated | interop/test_default_flags.py::test_a_model_is_what_it_is_by_itself
nn/data_parallel/test_fsdp_pre_backward_hook.py
  not     | hooks are registered anew in each forward | no hooks: a unit's backward is in the graph
nn/data_parallel/test_fsdp_offload.py
  has     | parameters on the disk | transforms/test_offload.py::test_any_step_is_the_one_that_offloads_nothing
nn/misc/test_flatten_params_wrapper.py
  has     | leaves in one flat tensor, and back under their names | sharded/test_sharded.py::test_a_whole_buffer_shows_what_it_was_gathered_from
nn/misc/test_grad_bucket.py
  has     | small gradients share a buffer | transforms/test_shard_ledger.py::test_small_neighbours_share_a_buffer
nn/data_parallel/test_fsdp_multiple_wrapping.py
  not     | a wrapper in another's place | units nest; nothing is wrapped twice
nn/data_parallel/test_fsdp_memory.py
  has     | bytes after each phase, with and without checkpoints | planning/test_plan_memory.py::test_the_planned_peak_is_the_measured_one
nn/data_parallel/test_fsdp_overlap.py
  differs | gathers fly beneath computing, by the clock | by the order of starts and waits | comm/test_splitting.py::test_backward_is_the_forward_order_turned_round
nn/data_parallel/test_fsdp_regnet.py
  differs | batch norm in a wrapper of its own | statistics come back from the step, on any ranks | nn/test_synchronized.py::test_uneven_ranks_and_empty_ones_are_one_device
nn/data_parallel/test_sharded_ddp_features.py
  has     | training, by buckets and without | fairscale/test_fairscale.py::test_a_sharded_step_is_fairscales
  differs | trainability changes between steps | another loss is another record; OSS loses updates there | fairscale/test_fairscale.py::test_layers_that_thaw_are_those_of_torch
  has     | two optimizers for one model | optim/test_base.py::test_a_partition_is_each_optimizer_on_its_own_leaves
  has     | a generator and a discriminator | examples/test_recipes.py::test_two_models_are_one_device_s
  not     | reduce() by hand, sync_buffers() | gradients are reduced where they are made; buffers are returned
nn/data_parallel/test_sharded_ddp_pytorch_parity.py
  has     | with clipping, accumulation | fairscale/test_fairscale.py::test_a_sharded_step_is_fairscales
  has     | with torch's amp | transforms/test_precision.py::test_an_autocast_around_units_is_honoured_also_when_they_run_again
optim/test_oss.py
  has     | closed forms of a step, with momentum | optim/test_laws.py::test_apply_has_the_bits_of_torchs
  has     | schedules of learning rates | optim/test_elementwise.py::test_a_schedule_is_the_scheduler_asked_for_each_count
  has     | norms are torch's | fairscale/test_fairscale.py::test_a_sharded_step_is_fairscales
  has     | more ranks than parameters | optim/test_strides.py::test_a_rank_without_elements_counts_too
  differs | add_param_group while training | ff.partition names groups beforehand; OSS moves what had thawed | fairscale/test_fairscale.py::test_layers_that_thaw_are_those_of_torch
  not     | step(closure) | a step is a function: call the loss again in it
  differs | balanced by whole tensors, greedily | by elements: equal parts | sharded/test_layout.py::test_pack_flat_lays_leaves_end_to_end_and_pads_at_the_end
optim/test_single_node_adascale.py
  has     | gains, smoothing, accumulation, Adam | optim/test_adascale.py::test_the_gains_are_fairscales
optim/test_ddp_adascale.py
  has     | the same over ranks | optim/test_adascale.py::test_each_sample_is_seen_whole_and_once
optim/test_oss_adascale.py
  has     | the same over sharded state | optim/test_adascale.py::test_the_gains_are_fairscales
optim/test_adam.py
  differs | pure float16, its scale of moments | float16 moments go by that rule, parameters round by chance or have masters | optim/test_low_precision.py::test_float16_moments_follow_fairscales_scale
optim/test_layerwise_gradient_scaler.py
  has     | a scale for each layer | optim/test_layerwise_scaling.py::test_who_overflows_backs_off_and_the_step_is_skipped_on_all
experimental/optim/test_dynamic_loss_scaler.py
  has     | a dynamic scale, down to its minimum | optim/test_loss_scaling.py::test_at_the_minimum_it_raises_and_the_state_is_as_it_was
nn/model_parallel/test_layers.py
  has     | column, row and vocabulary layers | nn/test_four_axes.py::test_a_step_over_all_axes_is_that_of_one_device
  differs | padding_idx counts within a rank's rows | in the table: its row gets no gradient where it lies | nn/test_tensor_parallel.py::test_a_padding_row_gets_no_gradient_on_the_rank_that_has_it
nn/model_parallel/test_cross_entropy.py
  has     | cross-entropy of split logits | nn/test_cross_entropy.py::test_it_is_the_loss_of_whole_logits
nn/model_parallel/test_random.py
  has     | random numbers that ranks share, and that they do not | nn/test_draws.py::test_split_masks_are_independent_and_whole_ones_equal
nn/moe/test_top2gating.py
  has     | the gate's numbers | nn/test_gating.py::test_fairscales_numbers
nn/moe/test_moe_layer.py
  has     | identity experts, one gate a token, unused experts | nn/test_experts.py::test_ranks_are_every_expert_on_every_token
nn/pipe/test_parity.py
  has     | parity with one device | pipelining/test_pipeline_laws.py::test_a_pipelined_gradient_call_has_the_bits_of_one_device
nn/pipe/test_pipe.py
  has     | uneven batches, several inputs, wrong counts | pipelining/test_pipeline_laws.py::test_uneven_microbatches_make_the_mean_over_the_batch
  has     | an error of a stage is everybody's, and nothing hangs | pipelining/test_pipeline_bad_input.py::test_a_stage_that_raises_raises_everywhere_and_leaves_the_state
nn/pipe/test_balance.py
  has     | balanced by time | pipelining/test_stage_plans.py::test_costs_may_be_times
  differs | balanced by size | by FLOPs; memory by plan and search | pipelining/test_stage_plans.py::test_a_cut_is_the_best_of_all
nn/pipe/test_checkpoint.py
  has     | all, all but the last, none | transforms/test_remat.py::test_how_many_microbatches_are_recomputed
nn/pipe/test_deferred_batch_norm.py
  has     | statistics of the whole batch, committed once | nn/test_statistics.py::test_uneven_microbatches_give_torchs_statistics
nn/pipe/skip
  has     | skips go straight to their consumer | pipelining/test_pipeline_ledger.py::test_a_skip_goes_straight_to_its_consumer
  not     | stash and pop, verified by name | a skip is a value that a later unit reads: nothing to forget
nn/pipe_process, experimental/nn/test_multiprocess_pipe.py
  has     | a stage for each process | transforms/test_shard_processes.py::test_processes_equal_simulated_ranks
  not     | MPI and RPC transports, lazy modules | torch.distributed carries it; parameters are made in place
experimental/nn/ampnet_pipe_process
  has     | asynchronous stages, with prediction | pipelining/test_asynchronous.py::test_equals_one_process_that_keeps_every_version
nn/checkpoint
  has     | the same numbers and draws when computed again | transforms/test_remat.py::test_the_bits_are_those_without_it
  has     | batch norm counts once | nn/test_statistics.py::test_a_recompute_counts_nothing_twice
  has     | what is saved lies on the host | transforms/test_offload.py::test_what_units_save_is_not_held_on_the_device
experimental/nn/data_parallel/test_gossip.py
  has     | local SGD, SlowMo, gossip | transforms/test_local_updates.py::test_numbers_of_fairscale
experimental/nn/test_offload.py
  has     | layers come and go, microbatch by microbatch | transforms/test_offload.py::test_a_state_of_48_units_trains_in_the_memory_of_two
experimental/nn/test_auto_shard.py
  differs | a model in parts of like size | by FLOPs, or by names | pipelining/test_stage_plans.py::test_stages_are_balanced_by_flops
experimental/nn/test_mevo.py
  has     | the last layer and its loss, tile by tile | nn/test_cross_entropy.py::test_nobody_holds_all_logits
  has     | margins | nn/test_cross_entropy.py::test_margins_are_those_of_the_equation
experimental/nn/test_sync_batchnorm.py
  has     | batch norm of all ranks' batches | nn/test_synchronized.py::test_uneven_ranks_and_empty_ones_are_one_device
nn/wrap/test_wrap.py
  has     | wrapped by size, attention whole | interop/test_patterns.py::test_attention_is_not_cut_by_size
experimental/tooling
  has     | what to checkpoint, from measured activations | planning/test_recomputation.py::test_the_fairscale_case
experimental/wgit
  not     | a store of weights by hash, sparse signals | checkpoints have checksums; versions of them are for other tools
"""  # noqa: E501
