"""``user-sys store``: what a person does with a store from a terminal. Each verb is a module; `grammar` names them."""
