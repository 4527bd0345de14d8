"""What torch's own tests hold of FSDP2: test/distributed/_composable/fsdp."""

ROWS = """
test_fully_shard_init.py
  has     | parameters lie as parts, of the shape that is theirs | state/test_train_state.py::test_unshard_undoes_place
  has     | a mesh, or a way to lie, that makes no sense is refused | comm/test_mesh.py::test_bad_axes_names_and_batches_are_refused
  has     | leaves of one wrapper travel together; of several dtypes apart | tracing/test_recording.py::test_dtypes_and_untrained_leaves_lie_apart
  differs | a scalar parameter raises | it is a leaf as any other, in a buffer with its neighbours | transforms/test_shard_laws.py::test_a_sharded_gradient_call_has_the_bits_of_one_device
  differs | a parameter that is not contiguous raises | it is taken row by row | optim/test_strides.py::test_a_step_is_that_of_dense_ones
  differs | shard_placement_fn: by which dim | buffers have no dim; Split(dim, axis) for leaves of their own | transforms/test_split_leaves.py::test_a_program_gives_what_it_gives_on_one_device
  has     | an uneven dim | transforms/test_shard_laws.py::test_a_sharded_gradient_call_has_the_bits_of_one_device
  has     | meta init: nothing is held whole before it is sharded | state/test_init_functions.py::test_beside_the_shards_one_leaf_is_held
  differs | rank 0's values are broadcast at init | each rank makes its part to the same bits; ranks that differ are told | comm/test_comparison.py::test_processes_are_told_before_they_compute
  has     | modules on meta are made on the way | interop/test_modules.py::test_a_module_on_meta_has_parameters_to_make
  not     | lazy init, root and module states | a function has no root: nothing is initialised at the first call
  not     | the class of a module is swapped, and named so | modules are copied into functions, and left as they are
  not     | fully_shard twice on one module raises | units are functions; one in another takes its own leaves
test_fully_shard_training.py
  has     | parity with one device: one wrapper, several | transforms/test_shard_laws.py::test_a_train_step_under_any_stack_has_the_bits_of_one_device
  has     | the same with the parameters on the host | transforms/test_offload.py::test_any_step_is_the_one_that_offloads_nothing
  not     | inputs are moved to the device by the root | a batch is where its loader put it
  not     | parameters are swapped in and out of the module, before and after forward | a unit is called with its whole parameters; no module holds them
  not     | casts of the model after init | parameters are values: cast them before init_state
  has     | a module is called several times in a forward | transforms/test_shard_ledger.py::test_a_step_sends_what_the_closed_form_says
  has     | forward and backward of a part of the model alone | transforms/test_shard_programs.py::test_a_gradient_call_is_that_of_one_device
  not     | explicit prefetching lists | gathers fly one unit ahead, in the order that was recorded
  has     | activation checkpointing, inside and outside | core/test_units.py::test_every_body_is_right_under_every_interpretation
  has     | a weight that two wrappers share | transforms/test_shard_ledger.py::test_a_step_sends_what_the_closed_form_says
  has     | gradient accumulation, with and without reducing each | transforms/test_shard_laws.py::test_a_train_step_under_any_stack_has_the_bits_of_one_device
  has     | microbatches in 1F1B order, with sharded parameters | transforms/test_shard_laws.py::test_a_train_step_under_any_stack_has_the_bits_of_one_device
  has     | tensor parallelism over a second axis | nn/test_four_axes.py::test_a_step_over_all_axes_is_that_of_one_device
  has     | HSDP: replicas of shards | transforms/test_shard_laws.py::test_a_sharded_gradient_call_has_the_bits_of_one_device
  differs | register_fsdp_forward_method: other methods gather too | any function is a unit | core/test_units.py::test_any_pytree_in_and_out
  has     | an optimizer in the backward | optim/test_backward_steps.py::test_it_is_the_usual_step_in_bits_and_bytes
  has     | an axis of one rank | transforms/test_shard_ledger.py::test_an_axis_of_one_rank_sends_nothing
test_fully_shard_comm.py
  has     | how often is gathered and reduced, by reshard_after_forward | transforms/test_shard_ledger.py::test_a_step_sends_what_the_closed_form_says
  has     | reshard_after_forward of each module | transforms/test_kept_units.py::test_equals_one_device_and_sends_what_was_promised
  has     | prefetches fly beneath the backward, and in its order | comm/test_splitting.py::test_backward_is_the_forward_order_turned_round
  has     | a divide factor that does not overflow half precision | optim/test_loss_scaling.py::test_a_sum_in_float16_does_not_overflow_and_the_way_there_loses_little
  has     | a module whose output nobody reads | transforms/test_shard_ledger.py::test_a_step_sends_what_the_closed_form_says
  differs | a gather of one's own, a reduction of one's own | classes of ten lines, by value | transforms/test_wire.py::test_what_travels_is_a_cast_before_or_after_it_of_fewer_bytes
  not     | memory from the group's own allocator | nothing in fsfunc depends on NCCL's allocator
  not     | the order of streams, and which of them waits | eager torch.distributed orders it; our events are in plans
test_fully_shard_frozen.py
  has     | frozen parameters beside trained ones: no gradient, no reduction | interop/test_modules.py::test_frozen_parameters_have_no_gradient_no_moment_and_no_reduction
  has     | whole groups frozen | interop/test_modules.py::test_frozen_parameters_have_no_gradient_no_moment_and_no_reduction
test_fully_shard_clip_grad_norm_.py
  has     | norms over one axis and over two are those of one device | optim/test_sharded.py::test_norms_and_sums_count_each_element_once
  has     | clip_grad_norm_ itself, any p | optim/test_base.py::test_clipping_is_torchs
test_fully_shard_mixed_precision.py
  has     | param_dtype: computing narrow over wide parameters | transforms/test_precision.py::test_it_is_the_cast_done_by_hand
  has     | reduce_dtype apart from it | transforms/test_precision.py::test_a_wider_reduction_sums_what_the_narrow_one_loses
  has     | accumulation in the reduce dtype | transforms/test_precision.py::test_a_wider_reduction_sums_what_the_narrow_one_loses
  has     | one submodule in float16, norms in float32 | transforms/test_precision.py::test_what_is_excepted_computes_in_its_own_dtype_wherever_it_lies
  has     | output_dtype | transforms/test_precision.py::test_what_units_return
  has     | inputs that are dataclasses are cast | tree/test_nodes.py::test_precision_casts_what_one_holds
test_fully_shard_memory.py
  has     | between forward and backward the parts alone are held | transforms/test_shard_memory.py::test_after_the_forward_only_the_last_unit_is_whole
  has     | the peak of the backward is bounded, whatever the depth | transforms/test_shard_memory.py::test_buffers_in_the_backward_are_bounded
  has     | what was trained is let go of | transforms/test_growth.py::test_a_step_leaves_nothing
test_fully_shard_state_dict.py
  has     | a state dict of parts, saved and loaded, of any axes | checkpoint/test_resharding.py::test_any_layout_is_loaded_by_any_other
  has     | state dicts of what lies on the host | transforms/test_offload.py::test_a_saved_state_goes_back_to_where_its_target_lies
test_fully_shard_grad_scaler.py
  has     | unscaling and the found overflow, on all ranks | optim/test_loss_scaling.py::test_an_overflow_on_one_rank_skips_the_step_on_all
test_fully_shard_autograd.py
  has     | outputs that are no tensors, or hold them | core/test_units.py::test_any_pytree_in_and_out
  has     | outputs that the loss does not use | transforms/test_shard_units.py::test_every_rank_reduces_in_one_order_whatever_its_loss_reads
  differs | hooks after a gradient is accumulated | a rank's own gradients are seen by observe_gradients | optim/test_adascale.py::test_each_sample_is_seen_whole_and_once
test_fully_shard_extensions.py
  differs | tensor subclasses gather by a function of theirs | the way to travel is an argument of shard, not of the tensor | transforms/test_wire.py::test_eight_bits_are_off_by_half_a_step
  has     | a gather in fewer bytes, over HSDP too | transforms/test_hierarchy.py::test_levels_give_what_one_gather_and_one_sum_give
test_fully_shard_overlap.py
  differs | gathers and reductions are hidden, by the clock | by the order of starts and waits | transforms/test_hybrid_reductions.py::test_a_sum_over_replicas_runs_beside_the_backward
test_fully_shard_state.py
  not     | unshard() and reshard() by hand | ff.unshard gives values: there is nothing to bring back
test_fully_shard_compile.py
  has     | compiled blocks within a sharded step | core/test_compiled.py::test_a_compiled_unit_is_the_plain_one
  differs | one graph of the whole step | refused by the compiler, in our words; units compile | core/test_compiled.py::test_as_one_graph_it_is_refused_by_the_compiler_in_our_words
test_fully_shard_logging.py
  not     | what is logged with TORCH_LOGS | the ledger, the plan and the clock are values to look at
test_fully_shard_ignore_params.py
  differs | ignored_params stay as they are | what no unit takes stays whole | tracing/test_recording.py::test_a_leaf_read_outside_every_unit_stays_whole
"""  # noqa: E501
