# llama.cpp, built once by scripts/llama-cpp into a folder outside the build tree. Gives the targets
#   ggml::base      tensors, graphs, GGUF, and the interface of the backends
#   ggml::ggml      ggml::base and the registry that loads backends from LINKCPP_LLAMA_BIN, a macro it defines
#   ggml::internal  the one header that only a backend may include, ggml-backend-impl.h
#   llama::llama    libllama
# and the variable LINKCPP_LLAMA_BIN: the folder of llama.cpp's programs, shared libraries and backend modules.

if(LINKCPP_WORKER_ONLY)
  # ggml alone, with its CPU backend inside, from `scripts/llama-cpp --static-for`.
  find_package(Threads REQUIRED)
  add_library(ggml::base STATIC IMPORTED GLOBAL)
  set_target_properties(ggml::base PROPERTIES IMPORTED_LOCATION ${LINKCPP_STATIC_GGML}/lib/libggml-base.a
                                              INTERFACE_INCLUDE_DIRECTORIES ${LINKCPP_STATIC_GGML}/include)
  target_link_libraries(ggml::base INTERFACE Threads::Threads m)
  add_library(ggml::ggml STATIC IMPORTED GLOBAL)
  set_target_properties(ggml::ggml PROPERTIES IMPORTED_LOCATION ${LINKCPP_STATIC_GGML}/lib/libggml.a)
  target_link_libraries(ggml::ggml INTERFACE ${LINKCPP_STATIC_GGML}/lib/libggml-cpu.a ggml::base)
  target_compile_definitions(ggml::ggml INTERFACE LINKCPP_LLAMA_BIN="") # no modules to load
  return()
endif()

set(llama_cpp_command ${CMAKE_CURRENT_SOURCE_DIR}/scripts/llama-cpp)
if(LINKCPP_LLAMA_CPP)
  list(APPEND llama_cpp_command --checkout ${LINKCPP_LLAMA_CPP})
endif()

if(LINKCPP_SANITIZE AND NOT LINKCPP_FUZZ) # a fuzz target is one of clang's, of our code alone
  list(APPEND llama_cpp_command --sanitize ${LINKCPP_SANITIZE})
endif()

if(LINKCPP_GGML_ALONE)
  list(APPEND llama_cpp_command --ggml)
endif()

# Minutes the first time, milliseconds afterwards; its progress goes to the terminal.
execute_process(COMMAND ${llama_cpp_command} OUTPUT_VARIABLE llama_cpp OUTPUT_STRIP_TRAILING_WHITESPACE
                RESULT_VARIABLE llama_cpp_result)
if(NOT llama_cpp_result EQUAL 0)
  unset(LINKCPP_LLAMA_CPP CACHE) # a wrong path is not remembered
  message(FATAL_ERROR "llama.cpp could not be built: see above (command: ${llama_cpp_command})")
endif()

set(LINKCPP_LLAMA_BIN ${llama_cpp}/bin CACHE INTERNAL "llama.cpp's programs, libraries and backend modules")
message(STATUS "llama.cpp: ${llama_cpp}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
             ${CMAKE_CURRENT_SOURCE_DIR}/deps/llama.cpp.lock ${CMAKE_CURRENT_SOURCE_DIR}/scripts/llama-cpp
             ${LINKCPP_LLAMA_BIN}/libggml-base.so)

function(linkcpp_llama_library target library)
  add_library(${target} SHARED IMPORTED GLOBAL)
  set_target_properties(${target} PROPERTIES IMPORTED_LOCATION ${LINKCPP_LLAMA_BIN}/lib${library}.so
                                             INTERFACE_INCLUDE_DIRECTORIES ${llama_cpp}/include)
  target_link_libraries(${target} INTERFACE ${ARGN})
endfunction()

linkcpp_llama_library(ggml::base ggml-base)
linkcpp_llama_library(ggml::ggml ggml ggml::base)
if(NOT LINKCPP_GGML_ALONE)
  linkcpp_llama_library(llama::llama llama ggml::ggml)
endif()
target_compile_definitions(ggml::ggml INTERFACE LINKCPP_LLAMA_BIN="${LINKCPP_LLAMA_BIN}")

add_library(ggml::internal INTERFACE IMPORTED GLOBAL)
target_include_directories(ggml::internal SYSTEM INTERFACE ${llama_cpp}/include-internal)
target_link_libraries(ggml::internal INTERFACE ggml::base)
