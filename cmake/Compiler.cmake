# How all code of the project is compiled. Directory-wide on purpose: no target can forget it.

set(CMAKE_CXX_STANDARD 23)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)

# The hot loops are ggml's, built by themselves; what is left gains nothing from -O3 but compile time.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

# The rooms are linked into programs and into the plugin, a shared object that must export one symbol.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)

# -Wconversion without its sign part: sizes and offsets mix signed and unsigned all over ggml's and POSIX' interfaces,
# and a cast at each of them hides the conversions that lose bits.
# A designated initialiser names what differs from the defaults; the rest is not missing.
add_compile_options(-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Wno-missing-field-initializers -Werror)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # False alarms: on std::string's operator+ (gcc.gnu.org/PR105651), and on std::optional and std::expected of strings
  # (PR105562), and on copies into a vector that has just grown (PR100366, PR107852). clang-tidy and the sanitizers look
  # for the real ones.
  add_compile_options(-Wno-restrict -Wno-maybe-uninitialized -Wno-stringop-overflow -Wno-array-bounds)
endif()

if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  # libstdc++'s own std::stable_sort uses what it has deprecated.
  add_compile_options(-Wno-deprecated-declarations)
endif()

if(LINKCPP_SANITIZE)
  add_compile_options(-fsanitize=${LINKCPP_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${LINKCPP_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-Wno-maybe-uninitialized) # GCC warns about its own instrumentation
  endif()
endif()

add_compile_definitions(LINKCPP_VERSION="${PROJECT_VERSION}")
