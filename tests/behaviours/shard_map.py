"""What JAX's own tests hold of shard_map: tests/shard_map_test.py."""

ROWS = """
collectives
  has     | all_gather, psum_scatter, all_to_all, ppermute, psum: their values | comm/test_collectives.py::test_a_collective_is_its_formula_and_so_are_its_derivatives
  has     | over two axes at once, the first one major | comm/test_collectives.py::test_two_axes
  has     | their gradients, forward and reverse, twice | comm/test_collectives.py::test_a_collective_is_its_formula_and_so_are_its_derivatives
  has     | all_gather whose result is one value on all ranks, and its transpose | comm/test_transposes.py::test_a_move_and_its_transpose_pair_alike
  has     | psum and the step from one value to many transpose into each other | comm/test_transposes.py::test_a_move_and_its_transpose_pair_alike
  has     | an axis of size 1 | comm/test_ledger.py::test_bytes_are_the_closed_forms
  differs | axis_index_groups | an axis of the mesh for each level | transforms/test_hierarchy.py::test_levels_give_what_one_gather_and_one_sum_give
  has     | messages by pairs | comm/test_transfers.py::test_every_pair_both_ways
  has     | sends that wait for each other are found | comm/test_transfers.py::test_a_deadlock_says_who_waits_for_whom
  has     | axis_index: ranks that know who they are | comm/test_abstract.py::test_ranks_run_that_ask_for_what_tells_them_apart
  differs | psum of what is summed already multiplies it | so it does; ranks that sum and average at one place are told | derivatives/test_refusals.py::test_psum_never_meets_pmean
  has     | pmax | comm/test_collectives.py::test_what_has_no_meaning_is_refused
types
  has     | what differs by rank may not come out as one value | derivatives/test_refusals.py::test_what_differs_from_rank_to_rank_is_refused
  differs | an argument that varies is cast by pvary | types are found by running the step, never written | derivatives/test_law.py::test_a_loss_has_the_gradient_of_the_mean
  differs | check_vma=False | no switch: right, or refused with the line | derivatives/test_judge.py::test_programs_are_right_or_refused
  differs | control flow (scan, while, cond) has rules of types | Python runs it: each branch is seen as it is taken | planning/test_plan_units.py::test_branches_on_python_values_are_seen
  not     | unreduced values as arguments and results | a sum that is still to come lives within a step
in and out
  has     | each rank is given its part, and parts are joined | comm/test_mesh.py::test_the_parts_make_the_batch
  has     | trees in and out | comm/test_collectives.py::test_a_pytree_goes_leaf_by_leaf
  differs | in_specs and out_specs | a value says how it lies | sharded/test_sharded.py::test_it_shows_the_global_tensor
  has     | a tree that does not fit is told by its path | tree/test_tree.py::test_a_mismatch_names_the_one_place_that_differs
  differs | a dim that the axis does not divide is refused | parts may be uneven, or empty | sharded/test_layout.py::test_a_part_is_the_cut_by_definition_and_parts_make_the_whole
  has     | an axis that the mesh has not | comm/test_mesh.py::test_bad_axes_names_and_batches_are_refused
  differs | a value is printed with its rank's place in the mesh | with its path, global shape and layout | sharded/test_sharded.py::test_it_shows_the_global_tensor
  has     | what a function captures from outside is told | core/test_purity.py::test_a_captured_differentiated_tensor_is_refused
  has     | functions that return what they were given | tracing/test_recording.py::test_a_unit_may_return_its_parameter
  has     | outputs without a tensor | core/test_units.py::test_any_pytree_in_and_out
derivatives
  has     | jvp | comm/test_collectives.py::test_a_collective_is_its_formula_and_so_are_its_derivatives
  has     | jvp through a sharded step | transforms/test_shard_higher_order.py::test_a_jvp_is_that_of_one_device
  has     | reverse mode, to the second order | transforms/test_shard_higher_order.py::test_a_hessian_product_over_replicas_is_that_of_one_device
  has     | jacobians by row and by column | comm/test_collectives.py::test_a_collective_is_its_formula_and_so_are_its_derivatives
  has     | vjp pulled back again | comm/test_collectives.py::test_it_is_differentiated_from_outside_a_vmap_mesh_and_pulled_back_twice
  differs | gradients by what is closed over, not by arguments | what a unit captures and differentiates is refused, with the way out | core/test_purity.py::test_a_captured_differentiated_tensor_is_refused
  has     | a custom derivative within | core/test_units.py::test_every_body_is_right_under_every_interpretation
  has     | a custom backward of a wrong type is told | comm/test_transposes.py::test_a_move_and_its_transpose_pair_alike
vmap
  has     | vmap around collectives | comm/test_collectives.py::test_a_batch_is_one_collective_each_way
  has     | gradients per sample | comm/test_collectives.py::test_a_collective_is_its_formula_and_so_are_its_derivatives
  has     | vmap for a mesh's axis | comm/test_collectives.py::test_it_is_differentiated_from_outside_a_vmap_mesh_and_pulled_back_twice
  differs | spmd_axis_name: the mapped axis lies over ranks | per sample within a unit; across ranks refused | derivatives/test_refusals.py::test_it_is_refused_with_the_way_out
remat
  has     | remat around a sharded function, and within | transforms/test_shard_laws.py::test_a_train_step_under_any_stack_has_the_bits_of_one_device
  has     | collectives are not what is saved | transforms/test_policies.py::test_names_beside_collectives
  has     | policies by name | transforms/test_policies.py::test_named_values_are_not_computed_again
  differs | residuals that are inputs are not copied | remat keeps the inputs alone | transforms/test_remat.py::test_memory_falls_to_the_inputs_and_one_unit
compiling
  differs | under jit, and eagerly, alike | eager; units under torch.compile | core/test_compiled.py::test_a_compiled_unit_is_the_plain_one
  not     | partial auto: some axes left to the compiler | every axis is the program's own
  not     | Pallas and FFI calls, dead code of jaxprs, lowering text | there is no compiler of ours between
  has     | a value that Python asks for | tracing/test_program.py::test_glue_that_asks_for_a_value_is_told_where
random numbers
  has     | keys split over ranks draw apart | nn/test_draws.py::test_split_masks_are_independent_and_whole_ones_equal
  has     | one key on all ranks draws alike | nn/test_draws.py::test_split_masks_are_independent_and_whole_ones_equal
drawn programs
  has     | functions, meshes and specs drawn, against a loop over ranks | derivatives/test_judge.py::test_programs_are_right_or_refused
  has     | their gradients | transforms/test_shard_programs.py::test_a_gradient_call_is_that_of_one_device
  has     | FSDP by hand: a gather, and its transpose | comm/test_transposes.py::test_a_move_and_its_transpose_pair_alike
  has     | ring attention's gradient | nn/test_attention_masks.py::test_it_is_torchs_attention
"""  # noqa: E501
