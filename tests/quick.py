"""What plain `pytest` leaves out, and why; `pytest --full` runs it.

A line is a file, a test with all of its cases, or a case, with "*" for any text. Behind "but" stand the tests
of the file, or the cases of the test, that stay, with "or" between them.
"""

import fnmatch
import functools

import pytest

LEFT_OUT: dict[str, str] = {
    "Starts processes, or a browser.": """
        test_checkpoint_hints.py::test_a_full_disk_is_one_line
        test_convert_crash.py
        test_kernels_in_the_engine.py::test_decodes_where_jax_has_dropped_*
        test_demo.py::test_a_narrow_demonstration_*
        test_demo.py::test_the_demonstration_answers_and_measures
        test_eval_harness.py::test_the_command_line
        test_examples.py::test_every_example_begins_*
        test_eval_journal.py::test_the_lock_ends_with_the_process_that_holds_it
        test_processes.py
        test_release.py::test_works_outside_the_checkout
        test_training_mesh.py
        test_training_run.py::test_a_directory_is_free_again_*
        test_training_run.py::test_a_reader_that_stops_ends_a_command_without_a_traceback
        test_training_run.py::test_an_interrupted_command_*
        test_commands.py::test_nothing_needs_what_windows_*
        test_training_run.py::test_an_import_leaves_*
        test_watch.py::test_a_browser_*
    """,
    "Runs a page or an example; what it calls has tests of its own.": """
        test_constraints.py::test_the_page_limits_answers_to_a_pattern_and_a_schema
        test_commands.py::test_prompts_and_conversations_*
        test_defaults.py::test_a_stream_and_generate_*
        test_defaults.py::test_ids_that_one_types_*
        test_defaults.py::test_the_first_conversation_*
        test_docs.py::test_pages_on_a_bundled_model_run_as_printed
        test_docs.py::test_examples_in_docstrings_print_what_they_say
        test_docs.py::test_the_example_of_*
        test_docs.py::test_a_family_from_outside_reads_and_writes_checkpoints
        test_docs.py::test_the_examples_*
        test_docs.py::test_the_journal_of_the_page_*
        test_docs.py::test_the_printed_check_passes_and_the_default_layer_is_printed_in_full
        test_docs.py::test_the_samplers_of_the_page_decode_as_it_says_and_pass_its_check
        test_docs.py::test_the_site_has_a_page_for_every_policy_*
        test_docs.py::test_costs_of_a_model_are_printed_as_the_page_says
        test_eval_results.py::test_commands_that_run_as_printed_run
        test_examples.py::test_an_example_runs_and_writes_its_curve
        test_examples.py::test_a_conversation_without_a_terminal_prints_answers_alone
        test_examples.py::test_the_examples_of_the_page_run
        test_readme.py::test_a_policy_of_your_own_runs_and_is_exact_when_it_always_refreshes
        test_tuning_runs.py::test_the_*
        test_vision_chat.py::test_the_page_runs_as_printed
    """,
    "An application at work; its parts have tests of their own.": """
        test_bench.py::test_a_dense_model_begins_as_one_with_experts
        test_bench.py::test_generate_tiny
        test_bench.py::test_norms_of_queries_and_keys_keep_attention_as_peaked
        test_bench_peer_torch.py but test_other_policies_have_no_peer
        test_bench_policies.py::test_every_setting_is_printed
        test_bench_policies.py::test_rows
        test_bundled.py::test_block_causal_models_answer_chains_block_by_block
        test_bundled.py::test_questions_about_pictures_are_answered_and_need_their_picture
        test_campaigns.py::test_a_sample_of_the_campaign
        test_check.py::test_a_device_without_memory_turns_the_verdict
        test_check.py::test_each_operation_may_have_an_implementation_of_its_own
        test_check.py::test_meshes_of_all_devices
        test_check.py::test_operands_fit_every_implementation_and_real_models but attention
        test_check.py::test_speed_says_what_it_measured_and_what_it_left_out
        test_check.py::test_tokens_of_a_device_are_compared_with_another
        test_check.py::test_recorded_evidence_decides_where_load_says_nothing
        test_eval_harness.py but test_arguments_*
        test_eval_images.py::test_a_run_from_the_command_line
        test_eval_images.py::test_text_and_images_go_through_one_runner_and_end_at_stops
        test_eval_longbench.py::test_a_run_scores_each_task_and_resumes
        test_eval_reproduce.py::test_averages_are_over_tasks
        test_eval_reproduce.py::test_cells_are_measured_beside_what_is_printed_and_resumed
        test_eval_reproduce.py::test_tasks_of_lm_eval_are_asked
        test_eval_results.py::test_a_result_is_replaced_by_the_same_run_only
        test_eval_results.py::test_parts_are_merged_without_loss
        test_eval_runner.py::test_a_draw_depends_on_the_seed_and_the_request_only
        test_eval_runner.py::test_an_adapter_is_part_of_a_checkpoint_and_of_its_identity
        test_eval_runner.py::test_costs_are_counted_without_padding
        test_nonfinite.py::test_an_evaluation_records_such_a_sequence_as_a_failure
        test_roofline.py::test_assumptions_of_data_dependent_policies
        test_roofline.py::test_copies_and_statistics_are_counted
        test_roofline.py::test_memory_is_the_policy_s_and_shared_by_chips
        test_roofline.py::test_schedule_of_a_block_causal_model_is_the_engine_s
        test_tasks_curriculum.py::test_a_stage_ends_when_it_is_mastered
        test_tuning_runs.py::test_a_killed_run_resumes_to_the_same_result
        test_tuning_runs.py::test_a_setting_of_half_the_steps_takes_less_time_in_batches
    """,
    "Trains, or differentiates: the losses, one run and its refusals stay.": """
        test_nnx.py::test_adapters_alone_move
        test_nnx.py::test_nnx_optimizer_steps_as_optax but llada
        test_nnx.py::test_tunix_steps_as_the_loss_of_this_library but *-llada
        test_experts.py::test_gradients_of_ragged_products_are_those_of_all_experts
        test_lora.py::test_muon_takes_adamw_for_the_factors
        test_lora.py::test_training_moves_the_factors_alone_and_goes_on_from_checkpoints
        test_training_batch.py::test_the_loss_is_that_of_the_tokens_that_count
        test_training_loss.py::test_a_block_is_learnt_between_known_tokens_and_masks
        test_training_loss.py::test_isolation_is_drawn_for_each_example_and_counts_in_the_loss
        test_training_loss.py::test_padding_and_what_is_recomputed_change_neither_loss_nor_gradient
        test_training_loss.py::test_the_clean_half_learns_to_predict_the_next_token
        test_training_loss.py::test_the_loss_of_block_causal_models_is_that_of_a_pass_for_each_block
        test_training_objectives.py::test_a_reference_may_be_any_distance_away
        test_training_objectives.py::test_chunks_and_what_is_recomputed_change_nothing
        test_training_objectives.py::test_plain_forwards_give_the_same
        test_training_objectives.py::test_vrpo_begins_at_log_two_and_learns_from_its_gradient
        test_training_pictures.py::test_a_tower_from_nothing_*
        test_training_pictures.py::test_the_loss_is_that_of_the_decoder_s_logits
        test_training_pictures.py::test_the_tower_learns_if_it_is_asked_to
        test_training_run.py::test_a_changed_configuration_is_refused_by_name but changes0-* or changes5-*
        test_training_run.py::test_an_interrupted_run_says_how_to_go_on_and_does
        test_training_run.py::test_checkpoints_need_no_review but 4-3
        test_training_run.py::test_another_optimizer_is_refused_by_its_numbers but state
        test_training_run.py::test_options_that_change_no_step_done_so_far_are_free
        test_training_trainable.py::test_any_transformation_of_optax_trains
        test_training_trainable.py::test_float32_masters_take_steps_that_bfloat16_would_lose
        test_training_trainable.py::test_matrices_and_tables_decay_* but None
        test_training_trainable.py::test_micro_batches_make_the_step_of_the_whole_batch
        test_training_trainable.py::test_muon_makes_*
        test_training_trainable.py::test_names_choose_among_transformations
        test_training_trainable.py::test_frozen_parameters_stay_and_have_no_state
        test_trajectory.py::test_gradients_are_those_of_finite_differences_and_the_same_however_computed
    """,
    "A recording of a method of which another one stays.": """
        test_goldens.py::test_conforms[certainty-prior/dream-*]
        test_goldens.py::test_conforms[diffusion-gemma-forward/*] but *-p15
        test_goldens.py::test_conforms[dsb/*] but dsb/llada-tiny-plain-p13-g32-b8-t0.3
        test_goldens.py::test_conforms[forward/*-bf16-*]
        test_goldens.py::test_conforms[llada-v-preprocess/*] but llada-v-preprocess/anyres_max_4-rgba
        test_goldens.py::test_conforms[loglik-llada/*] but loglik-llada/cfg0p5
        test_goldens.py::test_conforms[prefix-cache/dream-*]
        test_goldens.py::test_conforms[sampler-*/dream-semiar]
        test_goldens.py::test_conforms[sdar-generate/*-static-*]
        test_goldens.py::test_conforms[stable-diffcoder-generate/*] but *-p21-*
        test_goldens.py::test_conforms[vanilla-dream/*] but vanilla-dream/entropy-b2-leftpad
        test_goldens.py::test_conforms[vanilla-llada/*] but vanilla-llada/cfg2-leftpad-b2
        test_goldens.py::test_conforms[dyllm/dream-*]
        test_goldens.py::test_conforms[es-dllm/dream-*]
        test_goldens.py::test_conforms[sampler-entropy/*-inverted]
        test_goldens.py::test_conforms[sampler-localleap/dream-*]
        test_goldens.py::test_conforms[adablock/dream-*]
    """,
    "Another recording of the same model or method; tests/test_quick.py says of which.": """
        test_goldens.py::test_conforms[fast-dllm-v2-forward/*]
        test_goldens.py::test_conforms[llada-moe-forward/*]
        test_goldens.py::test_conforms[llada-v-generate/*]
        test_goldens.py::test_conforms[llada2-forward/*]
        test_goldens.py::test_conforms[maskkv-scores/*]
        test_goldens.py::test_conforms[s2d2-fast-dllm-v2/*]
        test_goldens.py::test_conforms[sdar-forward/*]
        test_goldens.py::test_conforms[daedal/*]
        test_goldens.py::test_conforms[diffusion-gemma-generate/*]
        test_goldens.py::test_conforms[dkv-pd/*]
        test_goldens.py::test_conforms[dkv-prefill/*]
        test_goldens.py::test_conforms[dreamon/*]
        test_goldens.py::test_conforms[illada-var-generate/*]
        test_goldens.py::test_conforms[mage/*]
        test_goldens.py::test_conforms[freedave-*]
    """,
    "Further checks of a policy or a sampler; its recording and test_policies.py check what it does.": """
        test_growth.py but test_templates_grow_* or test_each_* or test_confidences_* or *refused or *says_so
        test_growth.py::test_each_sequence_grows_by_itself
        test_policies.py::test_a_block_goes_on_after_its_schedule_until_it_is_done but Confidence
        test_policies.py::test_a_sequence_that_is_due_leaves_its_batch_mates_alone
        test_policies.py::test_no_copy_of_the_cache_inside_the_loop
        test_policies.py::test_policy_further
        test_policies.py::test_sampler[CertaintyPrior-DualCache-dream]
        test_policies.py::test_sampler[DreamSchedule-Policy-dream]
        test_policy_d2cache.py::test_a_prior_*
        test_policy_d2cache.py::test_rollout_is_the_product_of_the_layers
        test_policy_dkv.py::test_limits_between_neighbors
        test_policy_dkv_greedy.py::test_planned_positions_are_those_decoded
        test_policy_dllm_cache.py::test_each_of_the_four_kinds_of_step_renews_its_part
        test_policy_es_dllm.py::test_any_policy_and_drafts_delay_the_end
        test_policy_es_dllm.py::test_evicted_pairs_are_not_attended_to_and_copies_are_what_was_retained
        test_policy_elastic.py::test_widened_counts_the_layers_that_a_refresh_recomputed
        test_policy_evict_prompt.py::test_pairs_are_chosen_anew_or_kept
        test_policy_intervals.py::test_these_steps_compute_the_prompt but DyLLM*
        test_policy_maskkv.py::test_a_full_budget_is_dllm_cache
        test_policy_maskkv.py::test_a_profile_survives_saving
        test_policy_reads.py::test_caches_of_two_sets_have_their_exact_limits
        test_policy_spa_cache.py::test_all_directions_are_the_values_themselves
        test_policy_spa_cache.py::test_proxies_*
        test_policy_sparse_dllm.py::test_a_delay_as_long_as_the_block_is_exact
        test_policy_sparse_dllm.py::test_a_shorter_last_block_leaves_more_to_keep
        test_policy_sparse_dllm.py::test_a_sequence_of_a_batch_equals_it_alone_at_other_settings
        test_policy_sparse_dllm.py::test_keeping_everything_without_delay_is_dual_cache
        test_policy_sparse_dllm.py::test_kept_pairs_always_fit
        test_policy_sparse_dllm.py::test_kept_pairs_are_those_of_plain_numpy but 0.5-3-both-dream
        test_policy_sparse_dllm.py::test_the_cache_holds_the_kept_pairs_in_order but both-dream
        test_policy_suffix_dropout.py::test_a_set_that_keeps_everything_is_the_policy_alone
        test_policy_suffix_dropout.py::test_each_block_draws_anew_*
        test_policy_suffix_dropout.py::test_nothing_is_read_* but NearAndLast-WindowDiffusion
        test_policy_suffix_dropout.py::test_the_draws_of_a_gaussian_have_its_probabilities
        test_policy_window_diffusion.py::test_kernels_leave_the_same_positions_out
        test_samplers_early_commit.py::test_a_sequence_commits_in_the_first_step_* but 5-dream
        test_samplers_early_commit.py::test_a_step_that_leaves_masks_out_does_not_commit but policy1-5
        test_samplers_early_commit.py::test_batch_mates_and_padding_change_nothing
        test_samplers_early_commit.py::test_thresholds_that_no_gap_reaches_are_the_sampler_alone
        test_samplers_generate.py::test_every_step_of_generate_equals_numpy but llada-*
        test_samplers_generate.py::test_steps_of_a_users_sampler_that_decode_nothing_are_counted_and_told_of
        test_samplers_methods.py::test_a_large_decay_decodes_from_left_to_right_also_in_padded_batches
        test_samplers_methods.py::test_predictions_of_later_blocks_count
        test_samplers_propose.py::test_confidences_are_never_infinite_or_nan
        test_samplers_propose.py::test_the_mask_token_is_chosen_only_*
        test_samplers_wino.py::test_a_cache_that_is_always_refreshed_is_exact
        test_samplers_wino.py::test_an_end_ends_nothing_while_it_may_be_taken_back
        test_samplers_wino.py::test_without_doubt_it_is_the_threshold
        test_sliding.py but test_a_round_* or test_masks_are_* or *refuse* or test_each_* or *_of_a_tokenizer
        test_sliding.py::test_masks_are_decoded_up_to_* but Sliding-Confidence-llada
        test_stops.py::test_tokens_are_those_of_the_whole_generation_* but WINO-Policy
        test_testing.py::test_a_broken_policy_is_told_by_the_check_that_it_breaks but AsItsMates-*
        test_testing.py::test_a_combination_* but SparseDLLM-WINO-LLaDA
        test_policy_dllm_cache.py::test_a_program_of_the_last_phase_alone_* but llada-DLLMCache
        test_policy_dyllm.py::test_salient_rows_run_by_themselves_*
        test_policy_elastic.py::test_tracking_the_whole_canvas_*
        test_policy_es_dllm.py::test_later_layers_run_as_many_rows_*
        test_policy_es_dllm.py::test_renewing_the_prompt_*
        test_samplers_free_dave.py::test_tokens_are_those_of_the_sampler_alone but dual
        test_sliding.py::test_each_sequence_ends_* but DualCache-*
        test_stops.py::test_a_chat_ends_where_* but none-* or 4#*
        test_stops.py::test_a_stop_that_is_revised_* but sampler0
        test_stops.py::test_decoding_ends_as_soon_* but 1-*
        test_stream.py::test_settled_tokens_stay but sampler0-*
    """,
    "More than a second for what other tests look at from another side.": """
        test_architecture.py::test_applications_and_what_is_slow_to_import_*
        test_block_causal.py::test_a_canvas_gives_each_computed_row_*
        test_eval_longbench.py::test_oddities_are_those_published
        test_eval_needle.py::test_a_haystack_of_text
        test_eval_reproduce.py::test_the_tables_are_whole_and_hold_what_is_printed
        test_experts.py::test_adapters_of_attention_train_beside_experts
        test_kernels_in_the_engine.py::test_explain_tells_how_experts_are_computed
        test_likelihood.py::test_draws_are_of_each_answers_own_length
        test_likelihood.py::test_sizes_spread_evenly_over_one_to_the_length
        test_llada_v_checkpoint.py::test_fewer_ids_leave_the_others_as_they_are
        test_load.py::test_every_end_of_a_list_ends_a_response
        test_lora.py::test_merged_matrices_compute_the_same
        test_noise.py::test_rows_draw_by_their_own_keys_of_every_implementation
        test_noise.py::test_the_distributions_are_what_they_are_called
        test_nonfinite.py::test_the_host_warns_raises_or_says_nothing
        test_parameters.py::test_initialize_makes_what_abstract_describes
        test_policy_dkv.py::test_decode_with_a_shifted_head_*
        test_policy_elastic.py::test_drift_is_the_cosine_*
        test_policy_reads.py::test_every_step_is_a_full_pass_whose_keys_are_masked_by_hand
        test_prompt_embeds.py::test_a_trace_of_embedded_prompts_has_positions_and_tokens
        test_release.py::test_contents
        test_roofline.py::test_schedule_is_the_engine_s
        test_samplers_propose.py::test_temperature_draws_from_the_tempered_softmax
        test_samplers_wino.py::test_a_given_token_is_never_taken_back
        test_sharded.py::test_saving_keeps_nothing_of_the_model_on_the_host
        test_strict_modes.py::test_modes_change_no_bit
        test_suffix.py::test_ends_of_text_and_stops_are_not_looked_for_in_a_suffix
        test_testing.py::test_a_sampler_that_leaves_masks_is_told_where
        test_traced_numbers.py::test_guidance_of_likelihoods_compiles_once
        test_training_objectives.py::test_a_supervised_part_is_*
        test_training_pictures.py::test_image_tokens_in_the_loss_*
        test_training_run.py::test_a_diverging_run_stops
        test_training_run.py::test_a_finished_run_is_returned_as_it_is_with_its_log
        test_tuning.py::test_every_grid_holds_settings_that_a_model_can_decode_with
        test_verify.py::test_another_dtype_is_reported_and_judged_by_logits
        test_vision_chat.py::test_of_several_stops_the_first_of_the_list_counts
        test_bench.py::test_positions_in_flight_are_counted_*
        test_bench_policies.py::test_figures_*
        test_block_causal.py::test_long_canvases_are_aligned_*
        test_docs.py::test_pictures_*
        test_docs.py::test_the_printed_policy_skips_*
        test_eval_runner.py::test_answers_that_grow_*
        test_eval_results.py::test_settings_go_with_the_sampler_of_the_command
        test_examples.py::test_a_file_of_prompts_*
        test_testing.py::test_every_kind_of_model_is_checked_or_named
        test_tuning_runs.py::test_a_table_of_every_policy_*
    """,
    "The same code over devices of a mesh.": """
        test_nnx.py::test_moments_are_split_as_the_model_is
        test_experts.py::test_experts_over_a_mesh
        test_generate_many.py::test_slots_are_split_over_devices
        test_mesh.py::test_a_mesh_gives_what_one_device_gives
        test_mesh.py::test_a_sharded_prompt_stays_so
        test_mesh.py::test_chosen_pairs_and_drafts_are_those_of_one_device
        test_mesh.py::test_each_device_runs_a_group_of_its_own
        test_mesh.py::test_full_passes_and_likelihoods_over_a_mesh
        test_mesh.py::test_warmup_compiles_what_a_batch_over_a_mesh_needs
        test_nonfinite.py::test_sequences_over_a_mesh_end_one_by_one
        test_prompt_embeds.py::test_inside_of_jit_and_over_a_mesh
        test_sharded.py::test_every_leaf_is_where_the_table_says but dream-False-((2, 2), ('dp', 'tp'))
        test_sharded.py::test_values_of_int8_lie_as_the_matrix_and_scales_as_its_outputs
        test_stream.py::test_a_stream_over_a_mesh_has_the_tokens_of_one_device
        test_vision.py::test_neither_batches_nor_the_form_of_layers_nor_a_mesh_change_features
    """,
    "The same code in another combination, which costs another compilation.": """
        test_diffusion_gemma.py but *options_without* or *refused_by_name* or *a_sampler_of* or *each_kind*
        test_analysis_capture.py::test_single_passes_take_* but llada
        test_analysis_capture.py::test_token_arrays_*
        test_analysis_capture.py::test_chosen_activations_*
        test_attention.py::test_turns_of_sequences_and_heads_are_all_at_once but mask1-3
        test_attention.py::test_platforms_that_differ_*
        test_block_causal.py::test_all_other_policies_decode
        test_block_causal.py::test_eviction_chooses_among_stored_pairs but MaskKV*
        test_block_causal.py::test_its_loop_stays_on_the_device_and_copies_no_cache
        test_block_causal.py::test_padding_moves_no_block
        test_block_causal.py::test_requests_in_flight_and_streams_give_what_a_prompt_gives_alone
        test_block_causal.py::test_templates_may_skip_blocks
        test_block_causal.py::test_the_exact_decoder_computes_no_finished_block_again but *-Confidence-*
        test_buckets.py::test_draws_do_not_depend_on_the_bucket
        test_causal_context.py but test_greedy_* or *refused_by_name
        test_buckets.py::test_sixty_requests_compile_no_more_programs_than_the_ladder_has
        test_constraints.py::test_all_ways_to_say_it_and_to_ask_are_one
        test_constraints.py::test_every_sampler_decodes_what_is_allowed but WINO or *-commit
        test_constraints.py::test_templates_have_sets_of_their_own_*
        test_constraints.py::test_tokens_one_by_one_and_drafts_keep_to_the_sets
        test_engine.py::test_an_empty_prompt_has_a_response_of_its_own_and_changes_no_other
        test_engine.py::test_lists_of_any_lengths_are_padded_wherever_a_prompt_goes_in
        test_engine.py::test_more_positions_than_the_model_was_made_for_are_told_of
        test_eviction.py::test_budgets_*
        test_eviction.py::test_chunks_give_what_all_pairs_give but 1-1
        test_eviction.py::test_heads_that_compete_share_*
        test_experts.py::test_a_router_decides_in_float32_whatever_the_models_dtype
        test_experts.py::test_int8_experts_decode_near_the_original
        test_experts.py::test_stacked_and_separate_layers_and_gradients
        test_export.py but test_an_exported_generation_* or *refuse*
        test_generate_many.py but test_an_interrupt_* or test_options_* or *_read_as_* or *refuse*
        test_generate_many.py::test_an_interrupt_anywhere_loses_nothing but after-enter
        test_group.py::test_a_full_step_runs_its_group_and_a_partial_one_the_batch
        test_group.py::test_no_sequence_waits_for_the_blocks_of_others
        test_group.py::test_sequences_in_groups_are_what_they_are_alone
        test_int8.py::test_converted_and_loaded_is_loaded_as_int8 but *-float32
        test_int8.py::test_logits_are_those_of_the_numbers_it_stands_for but llada-False-False
        test_int8.py::test_verify_compares_int8_as_it_is
        test_interventions.py but test_forward_* or test_steering_* or *refuse*
        test_interventions.py::test_forward_with_a_patch_is_the_network_with_that_value but residual-llada
        test_kernels_attention.py::test_equals_float64 but *-float32-*-both
        test_kernels_experts.py::test_all_tokens_to_one_expert_and_to_none
        test_kernels_experts.py::test_each_token_* but *-True-bfloat16-*
        test_kernels_experts.py::test_tiles_cover_*
        test_kernels_in_the_engine.py::test_each_device_of_a_mesh_* but attention-*
        test_kernels_in_the_engine.py::test_recorded_traces_replay_with_kernels
        test_likelihood.py::test_draws_average_to_the_expectation_over_all_masks
        test_likelihood.py::test_given_masks_equal_brute_force_of_each_row_alone but llada-1.2
        test_likelihood.py::test_ragged_answers_equal_each_alone
        test_logprobs.py::test_every_way_to_ask_has_them_and_nothing_else_changes
        test_logprobs.py::test_log_probabilities_are_those_of_the_trajectory but sdar-*
        test_logprobs.py::test_tokens_that_are_revised_have_their_last_step but llada-*
        test_lora.py::test_int8_matrices_may_have_adapters_but_not_be_merged
        test_noise.py::test_a_draw_is_that_of_its_sequence_step_and_place but *llada*
        test_noise.py::test_functions_that_draw_do_so_by_threefry_whatever_the_default_is
        test_nonfinite.py::test_a_sequence_*
        test_options.py::test_the_largest_numbers_that_they_hold_work
        test_prefix.py::test_a_prefix_goes_on_where_another_one_differs
        test_prefix.py::test_every_way_to_ask_takes_a_prefix
        test_prefix.py::test_prompts_that_begin_alike_are_answered_as_whole_ones
        test_prefix.py::test_a_final_prefix_is_reused_under_every_policy but MAGE
        test_presets.py::test_every_preset_can_begin_on_its_model but d2cache or sparse-dllm
        test_presets.py::test_every_recipe_is_a_request_of_its_model[llada2-mini]
        test_presets.py::test_model_shapes_have_the_published_number_of_parameters[diffusiongemma-*]
        test_presets.py::test_model_shapes_have_the_published_number_of_parameters[llada2-mini-*]
        test_prompt_embeds.py::test_full_passes_*
        test_prompt_embeds.py::test_interventions_act_on_the_inputs
        test_prompt_embeds.py::test_rows_of_the_table_in_the_place_of_ids_change_nothing
        test_roofline.py::test_every_policy_is_cheaper_* but DualCache
        test_roofline.py::test_experts_are_read_as_far_as_positions_are_sent_to_them but llada-moe-7b-*
        test_roofline.py::test_maskkv_reads_what_its_widest_head_keeps but 3-3-4096
        test_samplers_s2d2.py::test_a_template_*
        test_stream.py::test_a_bar_counts_tokens_and_changes_nothing
        test_stream.py::test_embeddings_guidance_ends_and_suffixes_are_as_at_once
        test_stream.py::test_the_cache_is_written_in_place_from_piece_to_piece
        test_suffix.py::test_a_response_before_a_suffix_is_a_template_with_masks_before_it
        test_traced_numbers.py::test_bits_are_those_of_a_program_with_constants
        test_traced_numbers.py::test_options_pass_through_jit_and_are_stacked_for_vmap
        test_traced_numbers.py::test_switching_a_feature_off_is_another_program
        test_traced_numbers.py::test_ten_values_compile_once but thresholds
        test_traced_numbers.py::test_vmap_over_numbers_equals_a_loop
        test_training_batch.py::test_labels_of_minus_100_do_not_count_wherever_they_stand but dream
        test_trajectory.py::test_a_bound_that_is_too_small_gives_nan_and_not_less
        test_trajectory.py::test_one_program_may_generate_and_score
        test_trajectory.py::test_plain_forwards_give_the_same
        test_vision_chat.py::test_a_batch_of_prompts_with_different_images_equals_them_alone
        test_vision_chat.py::test_chat_answers_with_text_and_never_with_a_header
        test_vision_chat.py::test_ids_that_are_suppressed_are_never_decoded_and_count_for_nothing
        test_bench.py::test_a_row_of_a_card_* but *many=5*
        test_chat.py::test_a_streamed_chat_* but options0
        test_constraints.py::test_an_automaton_allows_* but 0 or 1 or 2 or 3
        test_engine.py::test_blocks_schedules_and_draws_* but None-blocks or None-schedule
        test_mesh.py::test_answers_grow_*
        test_users_methods.py::test_masks_that_are_left_* but policy
        test_users_methods.py::test_nothing_is_said_where_*
        test_users_variants.py::test_a_subclass_in_a_canvas_* but DLLMCache*
    """,
    "A checkpoint of another model or dtype through the same code.": """
        test_bench.py::test_random_weights_of_published_shapes
        test_block_checkpoints.py::test_a_model_that_never_had_a_config_* but sdar-tiny-tied
        test_block_checkpoints.py::test_both_ways_bit_for_bit but sdar-tiny-tied-bfloat16
        test_bundled.py::test_it_chats but tiny-llada
        test_bundled.py::test_the_exact_decoder_answers_held_out_prompts
        test_convert.py::test_a_cut_vocabulary_is_one_that_the_authors_classes_take but llada
        test_convert.py::test_round_trip_is_bit_exact but float32-1-*
        test_convert.py::test_save_hf_writes_the_tokenizer_of_the_directory_a_model_came_from but True
        test_llada_v_checkpoint.py::test_there_and_back_every_bit_is_the_same but bfloat16
        test_foreign_checkpoints.py::test_byte_order_marks_are_no_text but tiny-llada
        test_load.py::test_an_index_names_shards_in_folders but spelled*
        test_load.py::test_prefixes_of_wrappers_are_removed but *llada*
        test_load.py::test_shapes_and_dtypes_are_those_of_the_definition but float32-*
        test_lora.py::test_pefts_files_hold_* but bfloat16-llada
        test_oracle_torch.py::test_left_padding
        test_oracle_torch.py::test_logits but *-1
        test_paths.py::test_all_ways_lead_to_one_place but relative
        test_paths.py::test_runs_are_found_again
    """,
}


@functools.cache
def reasons() -> dict[str, str]:
    """The lines of `LEFT_OUT`, each with its reason."""
    return {line.strip(): why for why, lines in LEFT_OUT.items() for line in lines.strip().splitlines()}


@functools.cache
def of_file(name: str) -> dict[str, str]:
    """The lines about a file, each with its reason."""
    return {line: why for line, why in reasons().items() if line.startswith(name)}


def name_of(item: pytest.Item) -> str:
    """A test as lines name it, such as `test_x.py::test_y[case]`."""
    return f"{item.path.name}::{item.name}"


def matches(line: str, test: str) -> bool:
    """Whether a line names a test."""
    function, _, case = test.removesuffix("]").partition("[")
    file, _, name = function.partition("::")
    if not line.startswith(file):
        return False
    pattern, _, kept = line.partition(" but ")
    part = name if "::" not in pattern else case
    stays = any(like(one, part) for one in kept.split(" or ") if kept)
    return not stays and like(pattern, test if "[" in pattern else function if "::" in pattern else file)


def like(pattern: str, text: str) -> bool:
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))
