# A package that the wheels lack: it only puts include folders into an order of preference.
set(ament_cmake_include_directories_FOUND TRUE)
function(ament_include_directories_order var)
  set(${var} ${ARGN} PARENT_SCOPE)
endfunction()
