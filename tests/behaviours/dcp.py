"""What torch's own tests hold of its checkpoints: test/distributed/checkpoint."""

ROWS = """
test_checkpoint.py
  has     | saving and loading, on every rank | checkpoint/test_checkpoint_processes.py::test_every_claim_holds_on_two_processes
  has     | an error of one rank is raised on all | checkpoint/test_save_async.py::test_an_error_of_one_rank_is_raised_by_all_that_wait
  has     | a disk or a reader that fails, at any call | checkpoint/test_blocks.py::test_every_call_of_the_file_system_may_fail
  has     | without processes: one device | checkpoint/test_resharding.py::test_any_layout_is_loaded_by_any_other
test_dtensor_resharding.py
  has     | from any layout to any other | checkpoint/test_resharding.py::test_any_layout_is_loaded_by_any_other
  has     | uneven parts, parts of two axes | checkpoint/test_resharding.py::test_every_stack_loads_what_any_saved
test_fsdp_tp_checkpoint_conversion.py
  has     | from FSDP to tensor parallel and back | transforms/test_split_leaves.py::test_a_state_with_split_leaves_goes_on_on_other_meshes
test_hsdp_checkpoint.py
  has     | replicas save once, load alike | checkpoint/test_resharding.py::test_every_stack_loads_what_any_saved
test_planner.py
  has     | each element is written by one rank, and nothing of it is sent | checkpoint/test_checkpoint_cost.py::test_a_few_numbers_are_sent_and_nothing_of_the_tensors
  has     | a key that is not there, a shape that is not the target's | checkpoint/test_damaged.py::test_a_target_that_does_not_match_is_told_by_path
  differs | allow_partial_load, strict | a part is asked for by name | checkpoint/test_partial_loads.py::test_what_is_chosen_is_read_renamed_and_converted
  not     | planners of one's own | what is written where is not for users to change
test_dedup_tensors.py
  has     | what several ranks hold is written by one | checkpoint/test_resharding.py::test_any_layout_is_loaded_by_any_other
test_file_system_checkpoint_cpu.py
  has     | views and tensors of any strides | checkpoint/test_resharding.py::test_a_view_is_saved_as_it_reads
  has     | loading in place, into a target's own memory | checkpoint/test_partial_loads.py::test_it_lies_where_the_target_lay
  differs | a path that exists is overwritten, or not | it is never; latest and keep number folders | checkpoint/test_users_files.py::test_nothing_is_written_over
  not     | compression of what is stored | a file of safetensors is read by anybody; compress folders outside
test_hf_storage.py
  has     | safetensors, readable by others | checkpoint/test_other_readers.py::test_dcp_and_safetensors_read_any_layout
  has     | what others wrote in safetensors is loaded | checkpoint/test_other_readers.py::test_what_others_wrote_is_loaded_onto_any_mesh
test_consolidate_hf_safetensors.py
  has     | parts become one file | checkpoint/test_other_readers.py::test_a_state_becomes_one_file_and_comes_back
  has     | leaf by leaf, in little memory | checkpoint/test_checkpoint_cost.py::test_one_file_is_made_one_leaf_at_a_time
  has     | files of at most some bytes, with an index | checkpoint/test_export.py::test_files_hold_at_most_so_many_bytes_and_an_index_says_which
test_quantized_hf_storage.py
  not     | quantised files are dequantised as they are read | a file's values are what it says; use a dtype of your own
test_format_utils.py
  differs | torch.save to DCP and back | pickles are refused; one safetensors file, both ways | checkpoint/test_refused.py::test_a_pickle_is_never_loaded
test_state_dict.py
  has     | model and optimizer of any transforms, to any | checkpoint/test_resharding.py::test_every_stack_loads_what_any_saved
  has     | full state dicts: gathered, on the host, on one rank alone | state/test_train_state.py::test_unshard_for_one_rank_and_to_a_dtype_of_device
  has     | a full state dict becomes parts | state/test_train_state.py::test_unshard_undoes_place
  differs | flattened optimizer state, names in place of numbers | moments lie in the tree of their parameters | state/test_born_layouts.py::test_what_is_made_of_laid_out_parameters_lies_as_they_do
  has     | frozen parameters have no state | interop/test_modules.py::test_frozen_parameters_have_no_gradient_no_moment_and_no_reduction
  differs | tied weights come back tied | a tie is one leaf that several units read | transforms/test_shard_ledger.py::test_a_step_sends_what_the_closed_form_says
  has     | learning rates and counts are kept | checkpoint/test_resume.py::test_another_process_goes_on_bit_by_bit
  has     | names that look alike, or hold dots | checkpoint/test_refused.py::test_keys_that_look_like_paths_are_told_apart
  not     | submodules and param groups as options | a state is a tree: save the part that is meant
test_state_dict_stager.py
  has     | the state of the call is saved, whatever comes after | checkpoint/test_save_async.py::test_the_state_of_the_call_is_saved
test_async_process_executor.py
  differs | saving in a process of its own | in a thread: nothing is copied, steps write elsewhere meanwhile | checkpoint/test_save_async.py::test_a_state_that_is_saved_and_stepped_is_spent
e2e/test_e2e_save_and_load.py
  has     | training goes on as if it had not stopped | checkpoint/test_resume.py::test_real_processes_go_on_bit_by_bit
  has     | on another number of ranks | checkpoint/test_resume.py::test_another_number_of_ranks_goes_on_to_rounding
  has     | async save, and a second while the first is under way | checkpoint/test_save_async.py::test_a_second_save_waits_for_the_first
  has     | random states | checkpoint/test_folders.py::test_each_rank_gets_its_own_generator_back
e2e/test_fine_tuning.py
  has     | a base is loaded, and adapters are trained beside it | examples/test_recipes.py::test_adapters_and_a_state_of_one_s_own
e2e/test_fsdp_ep.py
  has     | experts on an axis of their own | transforms/test_split_leaves.py::test_a_state_with_split_leaves_goes_on_on_other_meshes
e2e/test_pipeline.py
  has     | each stage saves and loads its own | checkpoint/test_resharding.py::test_every_stack_loads_what_any_saved
test_save_load_api.py
  has     | ranks that name different paths | checkpoint/test_folders.py::test_ranks_that_name_different_paths_are_told
test_nested_dict.py
  has     | trees of dicts and lists come back as they were | tree/test_tree.py::test_unflatten_undoes_flatten
test_compatibility.py
  has     | a file of another version is told | checkpoint/test_forged.py::test_a_manifest_that_makes_no_sense_is_refused_at_once
test_restricted_metadata_unpickler.py
  has     | metadata run no code | checkpoint/test_forged.py::test_a_manifest_that_makes_no_sense_is_refused_at_once
test_fsspec.py
  not     | remote storage by fsspec | folders of a file system; mount it
test_pg_transport.py
  not     | a state sent to another job's ranks | restart from a checkpoint in its place
_experimental/test_barriers.py
  has     | ranks agree that a save is complete before it has its name | checkpoint/test_checkpoint_processes.py::test_killed_at_any_moment_nothing_is_lost_or_half_read
"""  # noqa: E501
