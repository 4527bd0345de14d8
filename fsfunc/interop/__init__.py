"""nn.Module in and out: modules as functions, cut into units.

modules.py patterns.py   from_module, to_module; which modules are units
structures.py stubs.py   the copies that run, and what stands in them
module_tensors.py arguments.py   what a module holds; what goes in and out of units
call_tensors.py attributes.py   what a forward does to tensors and attributes
layer_plans.py layer_scopes.py   which layers are split; what lies between them
split_layers.py split_flow.py   torch's layers as they run split; what they meet
split_experts.py    a module's experts where they lie on ranks
split_values.py     logits and sequences of which a rank has a part
"""
