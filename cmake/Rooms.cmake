# The experts' arithmetic must round as written: no fused multiply-add that the source does not ask for.
set(LINKCPP_EXACT_ROOMS expert coordinator)

# linkcpp_room(NAME [DEPENDS rooms...] [LINK libraries...])
# The room in the current folder, src/NAME:
#   linkcpp::NAME  a static library of its *.cpp, and each header without a source compiled alone
#   NAME_test      a GoogleTest program of its *_test.cpp, each test a ctest test named NAME.Suite.test
# Files are included from src: `#include "NAME/file.h"`. scripts/check-rooms says which room may include which.
function(linkcpp_room name)
  cmake_parse_arguments(PARSE_ARGV 1 room "" "" "DEPENDS;LINK")
  if(room_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "linkcpp_room(${name}): unknown arguments ${room_UNPARSED_ARGUMENTS}")
  endif()
  list(TRANSFORM room_DEPENDS PREPEND linkcpp::)

  file(GLOB headers CONFIGURE_DEPENDS *.h)
  file(GLOB sources CONFIGURE_DEPENDS *.cpp)
  set(tests ${sources})
  list(FILTER tests INCLUDE REGEX "_test\\.cpp$")
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$")

  set(library linkcpp_${name})
  add_library(${library} STATIC ${sources})
  set_target_properties(${library} PROPERTIES LINKER_LANGUAGE CXX) # a room may start with headers alone
  add_library(linkcpp::${name} ALIAS ${library})
  target_include_directories(${library} PUBLIC ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${library} PUBLIC ${room_DEPENDS} ${room_LINK})
  if(name IN_LIST LINKCPP_EXACT_ROOMS)
    target_compile_options(${library} PRIVATE -ffp-contract=off)
  endif()

  # A header whose source includes it first is compiled alone there (scripts/check-rooms sees to that order).
  set(lone_headers ${headers})
  foreach(header IN LISTS headers)
    string(REGEX REPLACE "\\.h$" ".cpp" source ${header})
    if(source IN_LIST sources)
      list(REMOVE_ITEM lone_headers ${header})
    endif()
  endforeach()
  if(lone_headers)
    target_sources(${library} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/src FILES ${lone_headers})
    set_target_properties(${library} PROPERTIES VERIFY_INTERFACE_HEADER_SETS ON)
  endif()

  if(BUILD_TESTING AND tests)
    linkcpp_test(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE ${library})
    if(name IN_LIST LINKCPP_EXACT_ROOMS)
      target_compile_options(${name}_test PRIVATE -ffp-contract=off)
    endif()
  endif()
endfunction()

# linkcpp_test(NAME_test files... [TIMEOUT seconds] [PROPERTIES test properties...])
# A GoogleTest program, each of whose tests is a ctest test. Tests find llama.cpp's programs in $LINKCPP_LLAMA_BIN, ours in
# $LINKCPP_BIN.
function(linkcpp_test name)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "TIMEOUT" "PROPERTIES")
  if(NOT test_TIMEOUT)
    set(test_TIMEOUT 60)
  endif()
  math(EXPR test_TIMEOUT "${test_TIMEOUT} * ${LINKCPP_TEST_SLOWNESS}")
  string(REGEX REPLACE "_test$" "" label ${name})
  add_executable(${name} ${test_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE GTest::gtest_main GTest::gmock)
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 TEST_PREFIX "${label}."
                       PROPERTIES TIMEOUT ${test_TIMEOUT} LABELS ${label} ${test_PROPERTIES}
                       # two properties for two variables: a list of them does not survive the way to ctest
                       ENVIRONMENT "LINKCPP_BIN=${CMAKE_BINARY_DIR}/bin"
                       ENVIRONMENT_MODIFICATION "LINKCPP_LLAMA_BIN=set:${LINKCPP_LLAMA_BIN}")
endfunction()
