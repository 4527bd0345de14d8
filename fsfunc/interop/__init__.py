"""nn.Module in and out: modules as functions, cut into units.

modules.py patterns.py   from_module, to_module; units and words of a plan, by name
structures.py stubs.py   copies that run; placeholders in them, arguments of units
module_tensors.py   a module's tensors
call_tensors.py attributes.py   changes to tensors and attributes
compiled_units.py   units as functions that jit compiles
layer_plans.py      plans of split layers
split_shapes.py     shape rules of split features
split_layers.py     torch's layers as they run split
split_experts.py    experts spread over ranks
"""
