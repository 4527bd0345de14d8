"""nn.Module in and out: modules as functions, cut into units.

modules.py patterns.py   from_module, to_module; units and words of a plan, by name
module_tensors.py   a module's tensors
structures.py       a module's parts, the copies that run them, and their unit calls
call_tensors.py attributes.py   changes to tensors and attributes in one call
stubs.py            placeholders in copies, hooks and caches, arguments of units
whole_rows.py       masks of transformers' models in runs without data
layer_plans.py      plans of split layers
split_layers.py     torch's layers, and experts, as they run split
split_shapes.py     shape rules of split features
"""
